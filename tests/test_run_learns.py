"""The quickstart itself, with real vLLM: it learns, also through the death of its rollout, and only from its rewards."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path

import pytest

from .runs import assert_books_balance, random_model, rollout, train

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
def test_two_ranks_and_two_rollouts_get_there_though_one_is_killed_and_another_joins_late(tmp_path: Path) -> None:
    with train(tmp_path, f"model.path={tmp_path / 'tiny'}", "learner.ranks=2", "rollout.count=2") as run:
        run.wait_until("step 20", lambda: len(run.steps()) >= 20, 900)
        (victim,) = run.pids("async_rl.rollout", "rollout-1")
        os.kill(victim, signal.SIGKILL)
        run.wait_until("step 40", lambda: len(run.steps()) >= 40, 600)
        with rollout(run, "late"):
            result = run.finish(1200)
    assert "late#" in run.text() and "rollout-1#" in run.text()
    assert result["eval_last"] >= 0.93
    assert result["lag_max"] <= 2
    assert_books_balance(result, trained=160 * 16)


def test_a_synchronous_run_with_the_same_seed_writes_the_same_metrics_byte_for_byte(tmp_path: Path) -> None:
    written = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        model = f"model.path={random_model(tmp_path / name / 'random')}"
        with train(tmp_path / name, model, "max_staleness=0", "num_steps=4", "eval.every=2", "eval.draws=64") as run:
            result = run.finish(300)
        assert result["lag_max"] == 0
        files = [run.run_dir / "metrics.jsonl", *sorted((run.run_dir / "samples").glob("*.jsonl"))]
        written.append({path.name: path.read_bytes() for path in files})
    first, second = written
    assert len(first) == 4, "metrics, and the samples of three evaluations"
    assert differences(first, second) == []
    assert first == second


def differences(first: dict[str, bytes], second: dict[str, bytes]) -> list[tuple[str, set[str]]]:
    """The fields of the first line that differs in each file: the whole files would be thousands of characters."""
    found = []
    for name in first:
        lines = itertools.zip_longest(first[name].splitlines(), second[name].splitlines(), fillvalue=b"{}")
        fields = [
            [{f"{k}={v!r}" for k, v in json.loads(line).items()} for line in pair] for pair in lines if pair[0] != pair[1]
        ]
        found += [(name, one ^ other) for one, other in fields[:1]]
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_with_shuffled_rewards_nothing_is_learned(tmp_path: Path) -> None:
    with train(tmp_path, f"model.path={tmp_path / 'tiny'}", "algorithm.shuffle_rewards=true") as run:
        result = run.finish(1500)
    assert result["eval_last"] <= result["eval_first"] + 0.05
