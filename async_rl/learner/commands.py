"""The one loop of all learner ranks: rank 0 says what comes next, the others do it with it.

Owns the command group (gloo, CPU) and nothing else. Invariant: a rank other than 0 never decides by itself, so
collectives always match; rank 0 says IDLE at least every IDLE_S, so nobody sits in a collective until its timeout.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

IDLE_S = 5.0


class Code(IntEnum):
    STEP = 1  # a batch and its steering follow
    GATHER = 2  # argument: bucket
    PROCEED = 3  # gathers of this boundary are over
    SAVE = 4  # argument: step
    IDLE = 5
    END = 6
    ROLL_BACK = 7  # argument: version of the checkpoint


class Command(NamedTuple):
    code: Code
    argument: int


class Commands:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def issue(self, code: Code, argument: int = 0) -> None:
        """Rank 0 only: the next command of every rank."""
        if self.world_size > 1:
            dist.broadcast(torch.tensor([int(code), argument], dtype=torch.int64), src=0, group=self.group)

    def receive(self) -> Command:
        """Other ranks: wait for the next command, past any IDLE."""
        word = torch.zeros(2, dtype=torch.int64)
        while True:
            dist.broadcast(word, src=0, group=self.group)
            code = Code(int(word[0]))
            if code is not Code.IDLE:
                return Command(code, int(word[1]))
