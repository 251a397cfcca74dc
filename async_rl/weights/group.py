"""The private broadcast group of one membership: learner rank 0 and every engine rank.

Owns sockets, store and process group; imports torch only. Invariant: torch.distributed's default group is never touched,
every listener binds one given interface, and no call waits longer than the spec's timeout_s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class GroupSpec:
    """One member's view of a membership. rank 0 is the learner and hosts the store at host:port."""

    backend: Literal["gloo", "nccl"]
    host: str
    port: int
    tag: str  # random, tells this membership's keys from any other's
    rank: int
    world_size: int
    membership: int
    timeout_s: float  # longest formation, and longest single broadcast
