"""What every learner rank holds: its share of the models, and the collectives it takes part in.

Owns the order in which the parts are built. Invariant: every method here is called on all ranks alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from async_rl.learner.checkpoints.checkpoint import Checkpointer, holds_critic, step_folder
from async_rl.learner.checkpoints.saving import Saving
from async_rl.learner.commands import Code, Commands
from async_rl.learner.failure import RunStopped
from async_rl.learner.update.model import PolicyModel
from async_rl.learner.update.optim import Optimizer, policy_tensors
from async_rl.learner.update.scatter import scatter_batch
from async_rl.learner.update.steering import Steering, share_steering
from async_rl.learner.update.step import Callback, PolicyUpdate, StepReport
from async_rl.learner.update.value_update import ValueUpdate, make_value_update, trains_critic
from async_rl.observability.waiting import waiting
from async_rl.types import Batch
from async_rl.weights.source import WeightSource


@dataclass
class Rank:
    policy: PolicyModel
    optimizer: Optimizer
    update: PolicyUpdate
    source: WeightSource
    commands: Commands
    checkpointer: Checkpointer  # with a group of its own
    mesh: DeviceMesh  # what the models are sharded over
    group: dist.ProcessGroup  # gloo, of all learner ranks

    def __post_init__(self) -> None:
        self.saving = Saving(self.checkpointer)

    @property
    def critic(self) -> ValueUpdate | None:
        """While the run trains one."""
        return self.update.critic

    def make_critic(self) -> None:
        """One that has learnt nothing yet."""
        self.update.critic = make_value_update(self.update.config, self.update.device, self.mesh, self.group)

    def train(self, batch: Batch, version: int, steering: Steering, boundary: Callback, before_update: Callback) -> StepReport:
        """One learner step, see `PolicyUpdate.run`; a critic whose time has come is made first."""
        if self.critic is None and trains_critic(self.update.config, version):
            self.make_critic()
        with waiting(f"the step from version {version}, of which all ranks compute their share", normal=True):
            return self.update.run(batch, version, steering, boundary, before_update)

    def scatter(self, batch: Batch | None) -> Batch:
        """Rank 0's batch, on every rank."""
        with waiting("all ranks to take their share of the batch"):
            return scatter_batch(batch, self.group)

    def steer(self, steering: Steering | None) -> Steering:
        """Rank 0's steering, on every rank."""
        with waiting("all ranks to take the steering"):
            return share_steering(steering, self.group)

    def save(self, version: int, state: bytes | None, first: Callback | None = None) -> None:
        """Begin to write a checkpoint of the state as it is, see `Saving.begin`; none may be in progress."""
        self.saving.begin(version, self._tensors(), state, first)

    def load(self, checkpoint: Path) -> bytes | None:
        """Fill the models, their optimizers and the RNG; returns the state that rank 0 saved. Raises CheckpointError."""
        self.policy.at_rest()
        with waiting(f"all ranks to load {checkpoint}", normal=True):
            return self.checkpointer.load(checkpoint, self._tensors())

    def roll_back(self, version: int) -> None:
        """Weights, moments and RNG are those of that version's checkpoint; the caller sees to it that nothing reads them.

        A critic that this version did not have yet is given up: the next step begins with a new one. Raises CheckpointError;
        what is in memory is of no use then.
        """
        checkpoint = step_folder(self.checkpointer.directory, version)
        if self.critic and not holds_critic(checkpoint):
            self.update.critic = None
        self.load(checkpoint)

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

    def _tensors(self) -> dict[str, Tensor]:
        critic = self.critic.tensors() if self.critic else {}
        return policy_tensors(self.optimizer) | critic
