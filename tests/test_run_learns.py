"""The quickstart itself, with real vLLM: it learns, also through the death of its rollout, and only from its rewards."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from .runs import assert_books_balance, train

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def test_the_tiny_policy_learns_though_its_only_rollout_is_killed_on_the_way(tmp_path: Path) -> None:
    model = f"model.path={tmp_path / 'tiny'}"
    with train(tmp_path, model, "num_steps=40", "eval.every=10", "checkpoint.every=0") as run:
        run.wait_until("version 6", lambda: len(run.steps()) >= 6, 600)
        (victim,) = run.pids("async_rl.rollout", "--name")
        os.kill(victim, signal.SIGKILL)
        result = run.finish(600)
    assert 0.20 <= result["eval_first"] <= 0.50
    assert result["eval_last"] >= result["eval_first"] + 0.2
    assert result["reward_last"] > result["reward_first"]
    assert result["mismatch_abs_lag0"] < 1e-4
    assert result["lag_max"] <= 2
    assert_books_balance(result, trained=40 * 16)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_three_seeds_reach_93_percent_within_five_minutes(seed: int, tmp_path: Path) -> None:
    started = time.monotonic()
    with train(tmp_path, f"seed={seed}", f"model.path={tmp_path / 'tiny'}") as run:
        result = run.finish(1500)
    seconds = time.monotonic() - started
    assert result["eval_first"] < 0.50
    assert result["eval_last"] >= 0.93
    assert seconds < 300, "warm-up, engine start and training on two idle cores"
    assert_books_balance(result, trained=160 * 16)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_with_shuffled_rewards_nothing_is_learned(tmp_path: Path) -> None:
    with train(tmp_path, f"model.path={tmp_path / 'tiny'}", "algorithm.shuffle_rewards=true") as run:
        result = run.finish(1500)
    assert result["eval_last"] <= result["eval_first"] + 0.05
