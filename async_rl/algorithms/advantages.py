"""Advantages: how much better an answer is than its siblings. Imports torch only.

Invariant: a trajectory that cannot be compared (unscorable, or without a second valid sibling) has advantage 0 and enters
no statistic; a group without variance has advantage exactly 0. Statistics are float64 whatever the input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned
from async_rl.algorithms.filters import ZERO_STD


def comparable(rewards_N: Tensor, group_ids_N: Tensor, valid_N: Tensor) -> Tensor:
    """bool [N]: valid, with a finite reward, and at least one sibling of which the same holds.

    The others are to be left out of the loss *and* of its denominator.
    """
    check_aligned(rewards=rewards_N, group_ids=group_ids_N, valid=valid_N)
    usable_N = valid_N.bool() & rewards_N.isfinite()
    _, index_N = torch.unique(group_ids_N, return_inverse=True)
    return usable_N & (_per_group(usable_N.double(), index_N)[index_N] >= 2)


def grpo(
    rewards_N: Tensor,
    group_ids_N: Tensor,
    valid_N: Tensor,
    *,
    eps: float = 1e-6,
    ddof: int = 1,
    norm_std: bool = True,
) -> Tensor:
    """`(R - mean) / (std + eps)` over the comparable siblings; float64 [N].

    GRPO, arXiv:2402.03300; `norm_std=False` is Dr.GRPO's `R - mean`, arXiv:2503.20783. Groups are found by id (integers),
    in any order. `ddof=1` divides by n-1, as verl and TRL do. Raises ValueError when shapes differ.
    """
    keep_N = comparable(rewards_N, group_ids_N, valid_N)
    _, index_N = torch.unique(group_ids_N, return_inverse=True)
    zero = torch.zeros((), dtype=torch.float64, device=rewards_N.device)
    # Measured from the group's minimum, equal rewards are exact zeros, however large they are.
    floor_N = _per_group(torch.where(keep_N, rewards_N.double(), torch.inf), index_N, "amin")[index_N]
    shifted_N = torch.where(keep_N, rewards_N.double() - floor_N, zero)
    count_M = _per_group(keep_N.double(), index_N).clamp(min=1)
    centered_N = torch.where(keep_N, shifted_N - (_per_group(shifted_N, index_N) / count_M)[index_N], zero)
    std_N = (_per_group(centered_N**2, index_N) / (count_M - ddof).clamp(min=1)).sqrt()[index_N]
    scaled_N = centered_N / (std_N + eps) if norm_std else centered_N
    return torch.where(std_N < ZERO_STD, zero, scaled_N)


def _per_group(x_N: Tensor, index_N: Tensor, reduce: str = "sum") -> Tensor:
    """Sums (or minima, "amin") by group, [M]."""
    num_groups = int(index_N.max()) + 1 if len(index_N) else 0
    empty_M = torch.full((num_groups,), torch.inf if reduce == "amin" else 0.0, dtype=x_N.dtype, device=x_N.device)
    return empty_M.scatter_reduce_(0, index_N, x_N, reduce)


Advantage = Callable[[Tensor, Tensor, Tensor], Tensor]

ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": partial(grpo, norm_std=False)}
"""name -> function of (rewards_N, group_ids_N, valid_N) that gives float64 [N]."""
