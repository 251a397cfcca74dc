"""What each learner rank does in tests/test_learner_ranks.py: `python -m tests.learner_worker NUM_RANKS FOLDER [OTHER]`.

OTHER is the folder of an earlier run on another number of ranks, whose checkpoint is loaded here.
"""

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
from torch.distributed.tensor import DTensor

from async_rl.learner.checkpoints import checkpoint as checkpoint_module
from async_rl.learner.checkpoints.checkpoint import Checkpointer, CheckpointError
from async_rl.learner.update.model import hf_named_parameters, make_mesh
from async_rl.learner.update.optim import policy_tensors
from async_rl.learner.update.scatter import scatter_batch
from async_rl.learner.update.steering import Steering
from async_rl.types import Batch
from async_rl.weights.checksum import checksum
from async_rl.weights.source import WeightSource

from .learner_cases import CPU, flat_bytes, full, gradients_of, make_batch, make_config, make_policy, make_update, weights
from .ranks import fork_ranks
from .step_cases import METHODS, far_batch, method_update, near_batch, one_token_batch, step_of

TIMEOUT = timedelta(seconds=120)
BATCHES: dict[str, dict[str, Any]] = {
    "even": {"seed": 1},
    "uneven": {"seed": 2, "num_groups": 3, "group_size": 3},
    "one": {"seed": 3, "num_groups": 1, "group_size": 1, "masked_share": 0.0},  # the other ranks have no token
}
MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


def no_op() -> None: ...


class Rank:
    """`mesh` shards over all ranks; `hybrid` (HSDP) has two copies of the policy, at 2 ranks whole ones."""

    def __init__(self, num_ranks: int, rank: int, folder: Path, other: Path | None) -> None:
        self.rank, self.folder, self.other = rank, folder, other
        rendezvous = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
        self.mesh = make_mesh(make_config(learner={"ranks": num_ranks}).learner, CPU)
        self.hybrid = make_mesh(make_config(learner={"ranks": num_ranks, "replicas": 2}).learner, CPU)
        assert (self.mesh.shape, self.hybrid.shape) == ((num_ranks,), (2, num_ranks // 2))
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
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
        for name, mesh in (("clipped", self.mesh), ("clipped hybrid", self.hybrid)):
            self.keep(name, *gradients_of(tight, make_policy(mesh=mesh), make_batch(seed=1), self.group))

    def methods(self) -> None:
        for name in METHODS:
            self.keep(name, *step_of(method_update(name, 48, self.group, self.mesh), near_batch()))
            self.keep(f"{name}, few", *step_of(method_update(name, 48, self.group, self.mesh), one_token_batch()))
        self.keep("far", *step_of(method_update("sequences", 48, self.group, self.mesh), far_batch()))

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

        report = update.run(make_batch(seed=1), 0, Steering(), boundary, no_op)
        self.results["mini"] = {"metrics": report.metrics, "seen": seen, "weights": weights(policy)}

    def gathers(self) -> None:
        """Buckets asked for at the boundaries of a running step, the rest before its update, as the publisher does."""
        for name, mesh in (("flat", self.mesh), ("hybrid", self.hybrid)):
            policy = make_policy(mesh=mesh)
            update, _ = make_update(make_config(learner={"microbatch_tokens": 40}), policy, self.group)
            update.run(make_batch(seed=0), 0, Steering(), no_op, no_op)
            source = WeightSource(hf_named_parameters(policy), torch.float32, 32 << 10, root=self.rank == 0)
            held, stream, at_boundaries = weights(policy), bytearray(), [0]
            left = list(range(len(source.manifest.buckets)))

            def gather(num: int, source=source, left=left, stream=stream) -> None:
                for k in left[:num]:
                    bucket = source.gather(k)
                    assert (bucket is not None) == (self.rank == 0)
                    stream += b"" if bucket is None else bucket.numpy().tobytes()
                del left[:num]

            def boundary(gather=gather, count=at_boundaries) -> None:
                count[0] += 1
                gather(2)

            update.run(make_batch(seed=1), 1, Steering(), boundary, lambda gather=gather, left=left: gather(len(left)))
            equal = self.rank > 0 or (
                bytes(stream) == flat_bytes(held, source.manifest) and source.checksum() == checksum(held.items())
            )
            self.results[f"gathers {name}"] = {
                "equal": equal,
                "left": len(left),
                "boundaries": at_boundaries[0],
                "weights": weights(policy),
            }

    def poison(self) -> None:
        """Non-finite on rank 1 alone, in the loss or only in the gradient."""
        for kind in ("loss", "gradient"):
            self.results[f"poison {kind}"] = self.poisoned(kind, self.policy())
        self.results["poison loss hybrid"] = self.poisoned("loss", make_policy(mesh=self.hybrid))

    def poisoned(self, kind: str, policy) -> dict[str, Any]:
        touched: list[int] = []
        update, optimizer = make_update(make_config(), policy, self.group)
        update.run(make_batch(seed=1), 0, Steering(), no_op, no_op)
        before = state(policy, optimizer)
        objective = update.objective

        def spoiled(scored, step, part, logp_T, entropy_T, tally):
            return objective(scored, step, part, logp_T * torch.nan, entropy_T, tally)

        if self.rank == 1 and kind == "loss":
            update.objective = spoiled  # pyright: ignore[reportAttributeAccessIssue]
        if self.rank == 1 and kind == "gradient":
            policy.hf.get_submodule("model.norm").register_full_backward_hook(lambda m, i, o: (i[0] * torch.nan,))
        report = update.run(make_batch(seed=1), 1, Steering(), no_op, lambda: touched.append(1))
        after = state(policy, optimizer)
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
            update.run(make_batch(seed=step), step, Steering(), no_op, no_op)
        saved = checkpointer.save(3, policy_tensors(optimizer), b"ledger" if self.rank == 0 else None)
        self.results["saved"] = state(policy, optimizer)
        self.failing_saves(checkpointer, policy, optimizer)

        assert checkpointer.latest_complete() == saved
        other, other_update, _ = self.loaded(saved, self.mesh)
        for step in range(3, 6):
            a = update.run(make_batch(seed=step), step, Steering(), no_op, no_op)
            b = other_update.run(make_batch(seed=step), step, Steering(), no_op, no_op)
            assert a == b
        assert all(torch.equal(value, weights(policy)[name]) for name, value in weights(other).items())

    def loaded(self, folder: Path, mesh) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        """Another policy, its update and its state, all from the checkpoint."""
        policy = make_policy(seed=5, mesh=mesh)
        update, optimizer = make_update(make_config(), policy, self.group)
        assert Checkpointer(folder.parent, keep=2, group=self.group).load(folder, policy_tensors(optimizer)) == b"ledger"
        return policy, update, state(policy, optimizer)

    def other_checkpoints(self) -> None:
        """Those of a hybrid mesh, and of another number of ranks."""
        policy = make_policy(mesh=self.hybrid)
        update, optimizer = make_update(make_config(), policy, self.group)
        update.run(make_batch(seed=0), 0, Steering(), no_op, no_op)
        checkpointer = Checkpointer(self.folder / "hybrid", keep=2, group=self.group)
        checkpointer.save(1, policy_tensors(optimizer), b"ledger" if self.rank == 0 else None)
        self.results["saved hybrid"] = state(policy, optimizer)
        if self.other is None:
            return
        saved = Checkpointer(self.other / "checkpoints", keep=2, group=self.group).latest_complete()
        assert saved is not None
        for name, mesh in (("flat", self.mesh), ("hybrid", self.hybrid)):
            _, update, held = self.loaded(saved, mesh)
            assert not update.run(make_batch(seed=3), 3, Steering(), no_op, no_op).skipped
            self.results[f"loaded {name}"] = held

    def failing_saves(self, checkpointer: Checkpointer, policy, optimizer) -> None:
        def full_disk(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        writer, write = checkpoint_module.FileSystemWriter.write_data, checkpoint_module.write_file
        for rank, target in ((0, "shards"), (1, "shards"), (0, "manifest"), (1, "state")):
            moment = next(iter(optimizer.named_state().values()))
            if self.rank == rank and target == "shards":
                checkpoint_module.FileSystemWriter.write_data = full_disk
            if self.rank == rank and target == "manifest":
                checkpoint_module.write_file = full_disk
            if self.rank == rank and target == "state":
                moment.fill_(torch.nan)
            try:
                checkpointer.save(4, policy_tensors(optimizer), None)
                said = ""
            except CheckpointError as e:
                said = str(e)
            self.results[f"failed {rank} {target}"] = said
            checkpoint_module.FileSystemWriter.write_data, checkpoint_module.write_file = writer, write
            if target == "state":
                moment.fill_(3.0)


def state(policy, optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments, whole."""
    return weights(policy) | {k: full(v) for k, v in optimizer.named_state().items()}


def work(num_ranks: int, rank: int, folder: Path, other: Path | None) -> None:
    torch.set_num_threads(1)
    own = Rank(num_ranks, rank, folder, other)
    training = (own.gradients, own.methods, own.mini_batches, own.gathers, own.poison)
    for case in (own.scatter, *training, own.checkpoints, own.other_checkpoints):
        case()
    torch.save(own.results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(fork_ranks(work, *sys.argv[1:]))
