"""Whole runs of two learner ranks: who fails is told, who is signalled is heard, and nobody waits in vain."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from .runs import Run, assert_books_balance, random_model, rollout, train

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(300)]
TOY = (
    "rollout.engine=toy", "model.make=null", "groups_per_step=4", "rollout.num_slots=4", "eval.draws=0", "learner.ranks=2",
)  # fmt: skip
BOOM = """
import os
if os.environ.get("RANK") == "1":
    from async_rl.learner.rank import Rank
    train = Rank.train
    def fails(self, batch, version, *args, **kwargs):
        if version == 2:
            raise ValueError("boom")
        return train(self, batch, version, *args, **kwargs)
    Rank.train = fails
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.path={random_model(tmp_path_factory.mktemp('models') / 'random')}"


def _rank(run: Run, number: int) -> int:
    word = json.loads((run.run_dir / "status" / f"learner-{number}.json").read_text())
    return word["pid"]


def test_the_last_words_of_a_run_are_of_the_rank_that_failed_and_not_of_those_that_lost_it(tmp_path: Path, model: str) -> None:
    """BR-105."""
    (tmp_path / "sitecustomize.py").write_text(BOOM)
    with train(tmp_path, *TOY, model, "num_steps=1000", python_path=tmp_path) as run:
        run.wait_until("the step that fails", lambda: len(run.steps()) >= 2, 120)
        begin = time.monotonic()
        assert run.popen.wait(60) == 1
        assert time.monotonic() - begin < 15
        assert run.pids() == []
    *lines, last = run.text().splitlines()
    assert any("rank 1 failed: ValueError: boom" in line for line in lines[-22:])
    assert json.loads(last)["reason"] == "the learner ended with exit code 1: rank 1 failed: ValueError: boom"
    assert "has lost another rank" in (run.run_dir / "logs" / "learner-0.log").read_text()


def test_a_signal_to_another_rank_alone_saves_and_ends_the_run_which_then_goes_on(tmp_path: Path, model: str) -> None:
    """BR-103."""
    with train(tmp_path, *TOY, model, "num_steps=1000", "checkpoint.every=0") as run:
        run.wait_until("a step", lambda: len(run.steps()) >= 2, 120)
        os.kill(_rank(run, 1), signal.SIGTERM)
        begin = time.monotonic()
        assert run.popen.wait(60) == 128 + signal.SIGTERM
        assert time.monotonic() - begin < 15
    result = json.loads(run.text().splitlines()[-1])
    version = result["policy_version"]
    assert (result["status"], result["reason"]) == ("stopped", f"stopped by SIGTERM; checkpoint of version {version}")
    assert [path.name for path in (run.run_dir / "checkpoints").glob("step_*")] == [f"step_{version:06d}"]
    with train(tmp_path, *TOY, model, f"num_steps={version + 2}") as again:
        result = again.finish(150)
    assert f"resumed version {version}" in again.text()
    assert_books_balance(result, trained=4 * (version + 2))


def test_ctrl_c_to_all_ranks_is_one_wish_and_no_second_one(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TOY, model, "num_steps=1000", "checkpoint.every=0") as run:
        run.wait_until("a step", lambda: len(run.steps()) >= 2, 120)
        run.popen.send_signal(signal.SIGINT)
        assert run.popen.wait(60) == 128 + signal.SIGINT
    assert "stopped by SIGINT; checkpoint of version" in json.loads(run.text().splitlines()[-1])["reason"]


def test_ranks_wait_for_slow_rollouts_longer_than_any_collective_may_take(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-106: answers of 8 tokens that take 24 s."""
    monkeypatch.setenv("ASYNC_RL_TOY", json.dumps({"token_delay_s": 3.0}))
    with train(tmp_path, *TOY, model, "num_steps=2", "learner.step_timeout_s=15", "checkpoint.every=0") as run:
        assert_books_balance(run.finish(200), trained=8)
    log = (run.run_dir / "logs" / "learner-0.log").read_text()
    assert "for 4 groups for version 1: 0/4 ready, 4 leased (oldest group " in log and "waiting 20." in log
    assert "the next command of rank 0" not in (run.run_dir / "logs" / "learner-1.log").read_text()


def test_a_checkpoint_that_cannot_be_written_costs_two_ranks_nothing_but_it(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TOY, model, "num_steps=40", "checkpoint.every=2") as run:
        checkpoints = run.run_dir / "checkpoints"
        run.wait_until("a checkpoint", (checkpoints / "latest").exists, 120)
        checkpoints.rename(run.run_dir / "moved")
        checkpoints.write_text("in the way")
        run.wait_until("the failure", lambda: "failed (1 in a row)" in run.text(), 60)
        checkpoints.unlink()
        result = run.finish(200)
    assert "resumed version" not in run.text()
    assert_books_balance(result, trained=160)


def test_a_signal_within_a_step_is_heeded_after_it_on_both_ranks(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TOY, model, "num_steps=1000", "rollout.count=0") as run:
        with rollout(run, "slow", frozen=["staged"], frozen_s=6.0):  # the next step waits, begun, until its publish is over
            run.wait_until("a step", lambda: len(run.steps()) >= 2, 120)
            time.sleep(3.0)
            run.popen.send_signal(signal.SIGTERM)
            assert run.popen.wait(120) == 128 + signal.SIGTERM
    assert "checkpoint of version" in run.text() and "lost another rank" not in run.text()
