"""The one loop of all learner ranks: rank 0 says what comes next, the others do it with it.

Owns the command group (gloo, CPU) and nothing else. Invariant: a rank other than 0 never decides by itself, so
collectives always match; rank 0 says IDLE at least every IDLE_S, so nobody sits in a collective until its timeout.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from async_rl.observability.waiting import waiting

IDLE_S = 5.0


class Code(IntEnum):
    STEP = 1  # a batch and its steering follow
    GATHER = 2  # argument: bucket
    PROCEED = 3  # gathers of this boundary are over
    SAVE = 4  # argument: step
    IDLE = 5
    END = 6
    ROLL_BACK = 7  # argument: version of the checkpoint


NUMBERED = (Code.STEP, Code.GATHER, Code.SAVE, Code.ROLL_BACK)


class Command(NamedTuple):
    code: Code
    argument: int


class Commands:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.doing = "starting"  # for people: the command under way

    def issue(self, code: Code, argument: int = 0) -> None:
        """Rank 0 only: the next command of every rank."""
        self._begin(code, argument)
        if self.world_size > 1:
            with waiting(f"the other ranks to take {self.doing}"):
                dist.broadcast(torch.tensor([int(code), argument], dtype=torch.int64), src=0, group=self.group)

    def receive(self) -> Command:
        """Other ranks: wait for the next command, past any IDLE."""
        word = torch.zeros(2, dtype=torch.int64)
        while True:
            with waiting("the next command of rank 0, which owes one every 5 s"):
                dist.broadcast(word, src=0, group=self.group)
            code, argument = Code(int(word[0])), int(word[1])
            self._begin(code, argument)
            if code is not Code.IDLE:
                return Command(code, argument)

    def _begin(self, code: Code, argument: int) -> None:
        if code is not Code.PROCEED:
            self.doing = f"{code.name.lower()} {argument}" if code in NUMBERED else code.name.lower()
