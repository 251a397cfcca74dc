"""What every learner rank holds: its share of the model, and the collectives it takes part in.

Owns the order in which the parts are built. Invariant: every method here is called on all ranks alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from async_rl.learner.checkpoint import Checkpointer, step_folder
from async_rl.learner.commands import Code, Commands
from async_rl.learner.failure import RunStopped
from async_rl.learner.model import PolicyModel
from async_rl.learner.optim import PolicyOptimizer
from async_rl.learner.scatter import scatter_batch
from async_rl.learner.steering import Steering, share_steering
from async_rl.learner.step import PolicyUpdate
from async_rl.types import Batch
from async_rl.weights.source import WeightSource


@dataclass
class Rank:
    policy: PolicyModel
    optimizer: PolicyOptimizer
    update: PolicyUpdate
    source: WeightSource
    commands: Commands
    checkpointer: Checkpointer
    group: dist.ProcessGroup  # gloo, of all learner ranks

    def scatter(self, batch: Batch | None) -> Batch:
        """Rank 0's batch, on every rank."""
        return scatter_batch(batch, self.group)

    def steer(self, steering: Steering | None) -> Steering:
        """Rank 0's steering, on every rank."""
        return share_steering(steering, self.group)

    def save(self, version: int, state: bytes | None) -> None:
        """Raises CheckpointError on all ranks alike."""
        self.checkpointer.save(version, self.policy, self.optimizer, state)

    def roll_back(self, version: int) -> None:
        """Weights, moments and RNG are those of that version's checkpoint; the caller sees to it that nothing reads them.

        Raises CheckpointError; what is in memory is of no use then.
        """
        self.checkpointer.load(step_folder(self.checkpointer.directory, version), self.policy, self.optimizer)

    def follow_gathers(self) -> None:
        """Other ranks, within a step: gather with rank 0 until it says PROCEED."""
        while True:
            code, argument = self.commands.receive()
            if code is Code.GATHER:
                self.source.gather(argument)
            elif code is Code.PROCEED:
                return
            else:
                raise RunStopped(0, f"rank 0 ended the run within a step ({code.name})")
