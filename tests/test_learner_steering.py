"""Two sharded ranks: what rank 0 decides reaches the other bit for bit, and both go back to a checkpoint together."""

from __future__ import annotations

import multiprocessing
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from async_rl.config import Config
from async_rl.learner.checkpoints.checkpoint import Checkpointer
from async_rl.learner.commands import Code, Commands
from async_rl.learner.rank import Rank
from async_rl.learner.trainer import follow
from async_rl.learner.update.model import make_mesh
from async_rl.learner.update.steering import Steering, share_steering

from .learner_cases import CPU, full, make_config, make_policy, make_update, weights

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]
STEERED = Steering(1 / 3, 0.1 + 0.2)  # of no short form
TIMEOUT = timedelta(seconds=60)


class Following:
    """An update that keeps what it was called with, and moves its rank's share of the weights."""

    critic = None

    def __init__(self, config: Config, policy: Any, optimizer: Any) -> None:
        self.config, self.policy, self.optimizer = config, policy, optimizer
        self.called: list[tuple[int, Steering]] = []

    def run(self, batch: Any, step: int, steering: Steering, boundary: Any, before_update: Any) -> None:
        self.called.append((step, steering))
        boundary()
        with torch.no_grad():
            for tensor in (*self.policy.parameters(), *self.optimizer.named_state().values()):
                tensor += 1.0


def held(rank: Rank) -> dict[str, torch.Tensor]:
    return weights(rank.policy) | {name: full(value) for name, value in rank.optimizer.named_state().items()}


def lead(rank: Rank, update: Following) -> None:
    """What the trainer says in a step, a checkpoint, another step, a roll back."""
    rank.commands.issue(Code.SAVE, 3)
    rank.save(3, b"state")  # written while the steps below change what it was copied from
    for step in (3, 4):
        rank.commands.issue(Code.STEP, step)
        rank.steer(STEERED)
        update.run(None, step, STEERED, lambda: rank.commands.issue(Code.PROCEED), None)
    rank.commands.issue(Code.ROLL_BACK, 3)
    rank.saving.finish()
    rank.roll_back(3)
    rank.commands.issue(Code.END)


def work(number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2, timeout=TIMEOUT)
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    savers = dist.new_group(backend="gloo", timeout=TIMEOUT)
    assert isinstance(group, dist.ProcessGroup) and isinstance(savers, dist.ProcessGroup)
    config = make_config(learner={"ranks": 2})
    mesh = make_mesh(config.learner, CPU)
    policy = make_policy(mesh=mesh)
    _, optimizer = make_update(config, policy, group)
    update: Any = Following(config, policy, optimizer)
    rank = Rank(policy, optimizer, update, None, Commands(group), Checkpointer(folder, 1, savers), mesh, group)  # pyright: ignore[reportArgumentType]
    rank.scatter = lambda batch: batch  # pyright: ignore[reportAttributeAccessIssue]  # no batch is needed here
    before = held(rank)
    if number == 0:
        lead(rank, update)
    else:
        follow(rank)
    after = held(rank)
    torch.save(
        {
            "called": [(step, s.lr_scale, s.kl_beta) for step, s in update.called],
            "same": all(torch.equal(after[name], value) for name, value in before.items()),
        },
        folder / f"rank{number}.pt",
    )
    dist.destroy_process_group()


def test_the_other_rank_is_steered_and_rolled_back_with_rank_0(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=work, args=(number, tmp_path), daemon=True) for number in range(2)]
    for process in ranks:
        process.start()
    try:
        deadline = time.monotonic() + 150
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    for number in range(2):
        found = torch.load(tmp_path / f"rank{number}.pt", weights_only=True)
        assert found["called"] == [(step, STEERED.lr_scale, STEERED.kl_beta) for step in (3, 4)]
        assert found["same"], "weights and moments of both ranks' shards are those of the checkpoint"


def test_a_single_process_keeps_its_steering_and_rank_0_must_have_one() -> None:
    assert share_steering(STEERED, None) == STEERED
    with pytest.raises(ValueError, match="does not have"):
        share_steering(None, None)
