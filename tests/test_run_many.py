"""Whole runs of several learner ranks and of several rollouts, also of those that a person starts and stops by hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import ROOT, Run, assert_books_balance, random_model, rollout, train

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(600)]
TOY = ("rollout.engine=toy", "model.make=null", "groups_per_step=4", "eval.draws=8", "eval.every=0")
BY_HAND = (*TOY, "rollout.count=0", "observe.log_level=info")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.path={random_model(tmp_path_factory.mktemp('models') / 'random')}"


def _rank(run: Run, number: int) -> int:
    """The pid of a learner rank."""
    found = [pid for pid in run.pids("async_rl.learner") if b"\0RANK=%d\0" % number in _environment(pid)]
    (pid,) = found
    return pid


def _saved(run: Run) -> bool:
    return (run.run_dir / "checkpoints" / "latest").exists()


def _environment(pid: int) -> bytes:
    return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()


def test_a_run_outlives_a_rank_of_its_hybrid_learner_and_goes_on_with_fewer_ranks(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TOY, model, "num_steps=12", "checkpoint.every=3", "learner.ranks=2", "learner.replicas=2") as run:
        run.wait_until("a checkpoint and a step more", lambda: _saved(run) and len(run.steps()) >= 4, 200)
        os.kill(_rank(run, 1), signal.SIGKILL)
        run.wait_until("the second life", lambda: "resumed version" in run.text(), 120)
        result = run.finish(200)
    said = (run.run_dir / "logs" / "learner.log").read_text()
    assert "learner: rank 0 has lost rank 1: " in said and "Traceback" not in said
    assert [row["step"] for row in run.steps()] == list(range(1, 13))
    assert {row["incarnation"] for row in run.steps()} == {1, 2}
    assert_books_balance(result, trained=48)
    with train(tmp_path, *TOY, model, "num_steps=15", "learner.ranks=1") as again:
        result = again.finish(200)
    assert "resumed version 12 as incarnation 3" in again.text()
    assert [row["step"] for row in again.steps()] == list(range(1, 16))
    assert_books_balance(result, trained=60)


def test_a_learner_rank_that_freezes_is_named_and_the_run_goes_on_from_its_checkpoint(tmp_path: Path, model: str) -> None:
    quick = ("learner.ranks=2", "learner.step_timeout_s=10", "checkpoint.every=3")
    with train(tmp_path, *TOY, *quick, model, "num_steps=12") as run:
        run.wait_until("a checkpoint and a step more", lambda: _saved(run) and len(run.steps()) >= 4, 200)
        rollout_0, frozen = run.pids("async_rl.rollout", "rollout-0"), _rank(run, 1)
        os.kill(frozen, signal.SIGSTOP)
        run.wait_until("the second life", lambda: "resumed version" in run.text(), 200)
        assert not Path(f"/proc/{frozen}").exists()
        assert run.pids("async_rl.rollout", "rollout-0") == rollout_0
        result = run.finish(200)
    said = (run.run_dir / "logs" / "learner.log").read_text()
    assert "learner: rank 0 has lost rank 1: " in said and "Traceback" not in said
    assert "the learner lost one of its ranks; starting it again from its checkpoint (restart 1)" in run.text()
    assert [row["step"] for row in run.steps()] == list(range(1, 13))
    assert_books_balance(result, trained=48)


def test_without_rollouts_of_its_own_a_run_waits_for_those_started_by_hand(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *BY_HAND, model, "num_steps=40", "rollout.num_slots=4") as run:
        run.wait_until("the invitation", lambda: "start rollouts by hand with `async-rl rollout" in run.text(), 120)
        with rollout(run, "early", token_delay_s=0.5) as early:
            run.wait_until("a step", run.steps, 120)
            with rollout(run, "early") as twin:
                assert twin.finish(60) == 2
            said = f"async-rl: --name is early, and early with pid {early.popen.pid} lives: choose another --name"
            assert twin.output.read_text().startswith(said), "before anything was loaded"
            argv = [sys.executable, "-m", "async_rl.rollout", str(run.run_dir), "--name", "early"]  # which asks nobody before
            beside = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, start_new_session=True)
            assert beside.returncode == 2
            words = beside.stderr.splitlines()[-1]
            assert "early#1" in words and "has the name early and lives: choose another --name" in words
            assert early.popen.poll() is None and "early#2" not in run.text()
            early.popen.send_signal(signal.SIGTERM)
            assert early.finish(60) == 128 + signal.SIGTERM
        run.wait_until("the wait", lambda: "no rollout is left: waiting 120 s (rollout.timeout_s)" in run.text(), 30)
        assert "early#1 left: it was stopped" in run.text()
        with rollout(run, "late") as late:
            result = run.finish(200)
            assert late.finish(60) == 0
    assert len(run.steps()) == 40 and result["lag_max"] <= 2
    assert_books_balance(result, trained=160)


@pytest.mark.slow
def test_leases_follow_free_slots_so_a_fast_rollout_does_more_and_a_slow_one_is_waited_for(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *BY_HAND, model, "num_steps=40", "rollout.num_slots=2", "eval.draws=0") as run:
        with rollout(run, "slow", token_delay_s=0.25) as slow:
            run.wait_until("a step", run.steps, 120)
            with rollout(run, "fast", token_delay_s=0.001) as fast:
                run.wait_until("the fast one", lambda: "fast#2 joined" in run.text(), 120)
                before = 4 * len(run.steps())
                result = run.finish(300)
                assert (slow.finish(60), fast.finish(60)) == (0, 0)
    fast_groups, slow_groups = fast.counted()["groups_delivered"], slow.counted()["groups_delivered"] - before
    assert fast_groups > 2 * slow_groups
    assert slow_groups > 5, "it never starves"
    assert 0 < result["lag_max"] <= 2
    assert not any(row.get("events/lease_expired") for row in run.steps())
    assert_books_balance(result, trained=160)
