"""What each learner rank does in tests/test_learner_critic_ranks.py: `python -m tests.critic_worker NUM_RANKS FOLDER [OTHER]`.

OTHER is the folder of an earlier run on another number of ranks, whose checkpoint is loaded here.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from async_rl.config import Config
from async_rl.learner.checkpoints.checkpoint import Checkpointer
from async_rl.learner.update.model import make_mesh
from async_rl.learner.update.value_update import ValueUpdate
from async_rl.types import Batch

from .critic_cases import (
    critic_config,
    gradients_of,
    make_critic,
    make_value_update,
    state,
    targets,
    train,
    values_of,
    with_ends,
)
from .learner_cases import CPU, make_batch, make_config
from .learner_worker import BATCHES
from .ranks import fork_ranks

TIMEOUT = timedelta(seconds=120)
SMALL = {"microbatch_tokens": 48}
MOMENTS = torch.tensor([3.0, 30.0, 1200.0])


class Rank:
    """`mesh` shards over all ranks; `hybrid` (HSDP) has two copies of the critic, at 2 ranks whole ones."""

    def __init__(self, num_ranks: int, rank: int, folder: Path, other: Path | None) -> None:
        self.rank, self.folder, self.other = rank, folder, other
        rendezvous = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        self.mesh = make_mesh(make_config(learner={"ranks": num_ranks}).learner, CPU)
        self.hybrid = make_mesh(make_config(learner={"ranks": num_ranks, "replicas": 2}).learner, CPU)
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self.results: dict[str, Any] = {}

    def update(self, config: Config, **options: Any) -> ValueUpdate:
        return make_value_update(config, make_critic(self.mesh, **options), self.group)

    def gradients(self) -> None:
        for name, options in BATCHES.items():
            config = critic_config(learner=SMALL)
            self.keep(name, *gradients_of(config, make_critic(self.mesh), make_batch(**options), self.group))
        self.keep("hybrid", *gradients_of(critic_config(), make_critic(self.hybrid), make_batch(seed=1), self.group))

    def keep(self, name: str, grads: dict[str, torch.Tensor], figures: dict[str, float]) -> None:
        self.results[name] = {"grads": grads, "figures": figures}

    def scale(self) -> None:
        """Values before and after PopArt moves, and after a step on the new scale, summed over ranks."""
        config, batch = critic_config({"popart": 0.3}, SMALL), with_ends(make_batch(seed=2))
        update = self.update(config)
        before = self.values(update, config, batch)
        update.rescale(MOMENTS)
        after = self.values(update, config, batch)
        reason, _ = train(update, config, batch, *targets(batch))
        self.results["scale"] = {"before": before, "after": after, "reason": reason, "state": state(update)}

    def values(self, update: ValueUpdate, config: Config, batch: Batch) -> torch.Tensor:
        values = torch.cat(values_of(update, config, batch))
        dist.all_reduce(values, group=self.group)
        return values

    def half(self) -> None:
        """The decoder in bf16, as on a GPU: the head is not, so that PopArt still moves no value."""
        config, batch = critic_config({"popart": 0.3}, SMALL), make_batch(seed=2)
        update = self.update(config, device=SimpleNamespace(type="cuda"))
        before = self.values(update, config, batch)
        update.rescale(MOMENTS)
        after = self.values(update, config, batch)
        reason, _ = train(update, config, batch, *targets(batch))
        assert all(tensor.dtype == torch.float32 for key, tensor in state(update).items() if key != "critic.popart")
        self.results["half"] = {"before": before, "after": after, "reason": reason}

    def poison(self) -> None:
        """NaN at a token that one rank alone scores."""
        config, batch = critic_config(), make_batch(seed=1, masked_share=0.0)
        update, (old_R, returns_R) = self.update(config), targets(batch)
        train(update, config, batch, old_R, returns_R)
        before = state(update)
        returns_R[3] = torch.nan
        reason, figures = train(update, config, batch, old_R, returns_R, 1)
        after = state(update)
        same = all(torch.equal(after[key], value) for key, value in before.items())
        self.results["poison"] = {"reason": reason, "figures": figures, "same": same}

    def checkpoints(self) -> None:
        config = critic_config({"popart": 0.3})
        update = self.update(config)
        update.rescale(MOMENTS)
        for step in range(2):
            train(update, config, make_batch(seed=step), *targets(make_batch(seed=step)), step)
        Checkpointer(self.folder / "checkpoints", keep=2, group=self.group).save(
            2, update.tensors(), b"" if self.rank == 0 else None
        )
        self.results["saved"] = state(update)
        if self.other is not None:
            again = self.update(config, seed=5)
            checkpointer = Checkpointer(self.other / "checkpoints", keep=2, group=self.group)
            folder = checkpointer.latest_complete()
            assert folder is not None
            checkpointer.load(folder, again.tensors())
            self.results["loaded"] = state(again)
            assert train(again, config, make_batch(seed=2), *targets(make_batch(seed=2)), 2)[0] == ""


def work(num_ranks: int, rank: int, folder: Path, other: Path | None) -> None:
    torch.set_num_threads(1)
    own = Rank(num_ranks, rank, folder, other)
    for case in (own.gradients, own.scale, own.half, own.poison, own.checkpoints):
        case()
    torch.save(own.results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(fork_ranks(work, *sys.argv[1:]))
