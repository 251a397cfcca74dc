"""What rank 0 decides anew for each update, and every rank must go by.

Imports torch only. Invariant: every rank has the very numbers of rank 0, or the shards of one policy would drift apart.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Steering:
    lr_scale: float = 1.0  # times the rate of the schedule
    kl_beta: float = 0.0  # coefficient of the KL to the reference


def share_steering(steering: Steering | None, group: dist.ProcessGroup | None) -> Steering:
    """The steering of rank 0, on every rank, bit for bit. `group` None means a single process.

    Collective over `group` (gloo). Raises ValueError when rank 0 has none.
    """
    root = group is None or dist.get_rank(group) == 0
    if root and steering is None:
        raise ValueError("rank 0 shares a steering that it does not have")
    numbers = torch.tensor(astuple(steering or Steering()), dtype=torch.float64)
    if group is not None and dist.get_world_size(group) > 1:
        dist.broadcast(numbers, group=group, group_src=0)
    return Steering(*numbers.tolist())
