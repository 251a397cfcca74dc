"""What each of two learner ranks does in tests/test_learner_ranks.py; run as `python -m tests.learner_worker RANK FOLDER`."""

from __future__ import annotations

import dataclasses
import errno
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from async_rl.learner import checkpoint as checkpoint_module
from async_rl.learner.checkpoint import Checkpointer, CheckpointError
from async_rl.learner.model import hf_named_parameters
from async_rl.learner.scatter import scatter_batch
from async_rl.types import Batch

from .learner_cases import full, gradients_of, make_batch, make_config, make_policy, make_update, weights

NUM_RANKS = 2
BATCHES: dict[str, dict[str, Any]] = {
    "even": {"seed": 1},
    "uneven": {"seed": 2, "num_groups": 3, "group_size": 3},
    "one": {"seed": 3, "num_groups": 1, "group_size": 1, "masked_share": 0.0},  # the other rank has no token
}
MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


def no_op() -> None: ...


class Rank:
    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        rendezvous = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60))
        self.mesh = init_device_mesh("cpu", (NUM_RANKS,))
        self.hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self.results: dict[str, Any] = {}

    def policy(self, **options: Any):
        return make_policy(mesh=self.mesh, **options)

    def gradients(self) -> None:
        for name, options in BATCHES.items():
            for mode in MODES if name == "uneven" else MODES[:1]:
                config = make_config({"aggregation": mode}, {"microbatch_tokens": 48})
                self.keep(f"{name} {mode}", *gradients_of(config, self.policy(), make_batch(**options), self.group))
        untied = self.policy(tie_word_embeddings=False)
        self.keep("untied", *gradients_of(make_config(), untied, make_batch(seed=1), self.group))
        hybrid = make_policy(mesh=self.hybrid)
        self.keep("hybrid", *gradients_of(make_config(), hybrid, make_batch(seed=1), self.group))
        tight = make_config(learner={"max_grad_norm": 0.1})
        self.keep("clipped", *gradients_of(tight, self.policy(), make_batch(seed=1), self.group))

    def keep(self, name: str, grads: dict[str, torch.Tensor], report) -> None:
        self.results[name] = {"grads": grads, "metrics": report.metrics, "num_tokens": report.num_tokens}

    def mini_batches(self) -> None:
        """Weights are at rest, and can be gathered, at every boundary, also between forwards without a backward."""
        policy, seen = self.policy(), []
        update, _ = make_update(make_config({"num_minibatches": 2}, {"microbatch_tokens": 40}), policy, self.group)
        named = hf_named_parameters(policy)

        def boundary() -> None:
            live = dict(policy.named_parameters())
            assert all(isinstance(p, DTensor) for p in live.values())
            seen.append(float(sum(full(p).double().sum() for _, p in named)))

        report = update.run(make_batch(seed=1), 0, boundary, no_op)
        self.results["mini"] = {"metrics": report.metrics, "seen": seen, "weights": weights(policy)}

    def poison(self) -> None:
        """Non-finite on rank 1 alone, in the loss or only in the gradient."""
        for kind in ("loss", "gradient"):
            self.results[f"poison {kind}"] = self.poisoned(kind)

    def poisoned(self, kind: str) -> dict[str, Any]:
        policy, touched = self.policy(), []
        update, optimizer = make_update(make_config(), policy, self.group)
        update.run(make_batch(seed=1), 0, no_op, no_op)
        before = weights(policy) | {k: full(v) for k, v in optimizer.named_state().items()}
        forward = update._forward

        def spoiled(scored):
            logp, entropy = forward(scored)
            return logp * torch.nan, entropy

        if self.rank == 1 and kind == "loss":
            update._forward = spoiled
        if self.rank == 1 and kind == "gradient":
            policy.hf.get_submodule("model.norm").register_full_backward_hook(lambda m, i, o: (i[0] * torch.nan,))
        report = update.run(make_batch(seed=1), 1, no_op, lambda: touched.append(1))
        after = weights(policy) | {k: full(v) for k, v in optimizer.named_state().items()}
        same = all(torch.equal(after[name], value) for name, value in before.items())
        return {"skipped": report.skipped, "reason": report.reason, "same": same, "touched": touched}

    def scatter(self) -> None:
        source = make_batch(seed=7)
        empty = dataclasses.replace(source, **{f.name: getattr(source, f.name)[:0] for f in dataclasses.fields(Batch)})
        for batch in (source, empty):
            got = scatter_batch(batch if self.rank == 0 else None, self.group)
            for f in dataclasses.fields(Batch):
                np.testing.assert_array_equal(getattr(got, f.name), getattr(batch, f.name), strict=True)

    def checkpoints(self) -> None:
        policy = self.policy()
        update, optimizer = make_update(make_config(), policy, self.group)
        checkpointer = Checkpointer(self.folder / "checkpoints", keep=2, group=self.group)
        for step in range(3):
            update.run(make_batch(seed=step), step, no_op, no_op)
        saved = checkpointer.save(3, policy, optimizer, b"ledger" if self.rank == 0 else None)
        self.results["saved"] = weights(policy) | {k: full(v) for k, v in optimizer.named_state().items()}
        self.failing_saves(checkpointer, policy, optimizer)

        other = self.policy(seed=5)
        other_update, other_optimizer = make_update(make_config(), other, self.group)
        assert checkpointer.latest_complete() == saved
        assert checkpointer.load(saved, other, other_optimizer) == b"ledger"
        for step in range(3, 6):
            a = update.run(make_batch(seed=step), step, no_op, no_op)
            b = other_update.run(make_batch(seed=step), step, no_op, no_op)
            assert a == b
        assert all(torch.equal(value, weights(policy)[name]) for name, value in weights(other).items())

    def failing_saves(self, checkpointer: Checkpointer, policy, optimizer) -> None:
        def full_disk(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        writer, write = checkpoint_module.FileSystemWriter.write_data, checkpoint_module._write
        for rank, target in ((0, "shards"), (1, "shards"), (0, "manifest"), (1, "state")):
            moment = next(iter(optimizer.named_state().values()))
            if self.rank == rank and target == "shards":
                checkpoint_module.FileSystemWriter.write_data = full_disk
            if self.rank == rank and target == "manifest":
                checkpoint_module._write = full_disk
            if self.rank == rank and target == "state":
                moment.fill_(torch.nan)
            try:
                checkpointer.save(4, policy, optimizer, None)
                said = ""
            except CheckpointError as e:
                said = str(e)
            self.results[f"failed {rank} {target}"] = said
            checkpoint_module.FileSystemWriter.write_data, checkpoint_module._write = writer, write
            if target == "state":
                moment.fill_(3.0)


def main() -> None:
    torch.set_num_threads(1)
    rank = Rank(int(sys.argv[1]), Path(sys.argv[2]))
    for case in (rank.scatter, rank.gradients, rank.mini_batches, rank.poison, rank.checkpoints):
        case()
    torch.save(rank.results, rank.folder / f"rank{rank.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
