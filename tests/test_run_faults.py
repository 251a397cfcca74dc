"""Whole runs under faults, with the toy engine: real torchrun, ZeroMQ, gloo, checkpoints and process deaths."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from pathlib import Path

import pytest

from .runs import Run, assert_books_balance, random_model, train

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
TOY = ("rollout.engine=toy", "model.make=null", "groups_per_step=4", "rollout.num_slots=4", "eval.draws=8", "eval.every=0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.path={random_model(tmp_path_factory.mktemp('models') / 'random')}"


def _version(run: Run) -> int:
    steps = run.steps()
    return steps[-1]["version"] if steps else 0


def _assert_nothing_left(run: Run) -> None:
    deadline = time.monotonic() + 10
    while run.pids() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.pids() == [], "no process outlives the run"


def _assert_stopped(run: Run, reason: str, code: int) -> None:
    result = json.loads(run.text().splitlines()[-1])
    assert result == json.loads((run.run_dir / "result.json").read_text())
    assert (result["status"], result["exit_code"], result["reason"]) == ("stopped", code, reason)
    assert reason in "".join(run.text().splitlines()[:-1])


def test_a_rollout_killed_mid_group_costs_nothing_but_time(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TOY, model, "num_steps=25", "rollout.count=2", "learner.threads=1") as run:
        run.wait_until("version 3", lambda: _version(run) >= 3, 120)
        victim = run.wait_until("rollout-0", lambda: run.pids("async_rl.rollout", "rollout-0"), 10)[0]
        os.kill(victim, signal.SIGKILL)
        result = run.finish(150)
    assert "rollout-0#" in run.text() and "starting it again" in run.text()
    assert result["lag_max"] <= 2
    assert_books_balance(result, trained=100)


def test_a_frozen_rollout_is_expelled_by_name_and_the_run_goes_on(tmp_path: Path, model: str) -> None:
    quick = ("transport.heartbeat_s=0.3", "transport.heartbeat_timeout_s=3", "weights.phase_timeout_s=5")
    with train(tmp_path, *TOY, *quick, model, "num_steps=40", "rollout.count=2") as run:
        run.wait_until("version 3", lambda: _version(run) >= 3, 120)
        frozen = run.pids("async_rl.rollout", "rollout-1")
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        run.wait_until("the expulsion", lambda: "rollout-1#" in run.text() and "expelled" in run.text(), 30)
        at = _version(run)
        run.wait_until("steps without it", lambda: _version(run) >= at + 2, 60)
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        result = run.finish(150)
    assert_books_balance(result, trained=160)


def test_a_killed_learner_resumes_from_its_checkpoint_with_the_rollout_left_running(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TOY, model, "num_steps=30", "checkpoint.every=5") as run:
        run.wait_until("a checkpoint and a step more", lambda: _version(run) >= 7, 120)
        rollout = run.pids("async_rl.rollout", "rollout-0")
        for pid in run.pids("async_rl.learner"):
            os.kill(pid, signal.SIGKILL)
        run.wait_until("the second life", lambda: "resumed version" in run.text(), 90)
        result = run.finish(150)
        assert run.pids("async_rl.rollout", "rollout-0") in (rollout, [])
    steps = [row["step"] for row in run.steps()]
    assert steps == list(range(1, 31)), "each step stands once in the metrics of the surviving timeline"
    assert {row["incarnation"] for row in run.steps()} == {1, 2}
    assert_books_balance(result, trained=120)


def test_sigterm_saves_ends_the_rollouts_and_the_run_can_be_continued(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TOY, model, "num_steps=12", "checkpoint.every=0") as run:
        run.wait_until("version 2", lambda: _version(run) >= 2, 120)
        run.popen.send_signal(signal.SIGTERM)
        assert run.popen.wait(60) == 128 + signal.SIGTERM
        assert "checkpoint of version" in run.text()
        _assert_nothing_left(run)
    with train(tmp_path, *TOY, model, "num_steps=12", "checkpoint.every=0") as again:
        result = again.finish(120)
    assert [row["step"] for row in again.steps()] == list(range(1, 13))
    assert_books_balance(result, trained=48)


def test_a_reward_that_always_raises_ends_the_run_with_its_error_said_once(tmp_path: Path, model: str) -> None:
    reward = "data.reward=tests.reward_functions:raises"
    with train(tmp_path, *TOY, model, "num_steps=5", reward) as run:
        assert run.popen.wait(120) == 4
    *lines, last = run.text().splitlines()
    (failure,) = [line for line in lines if "groups were unscorable" in line]
    words = r"async-rl: the learner ended with exit code 4: all of the last \d+ groups were unscorable"
    assert re.match(words, failure), "sixteen, and those that came before it was noticed"
    raised = "reward tests.reward_functions:raises raised ValueError: no such planet"
    (evaluated,) = [line for line in lines if line.startswith("-- held-out accuracy of version 0: ")]
    assert f"unknown (0 answers, 0 missing, 8 could not be scored, the first: {raised} (tests/reward_functions.py:" in evaluated
    assert any(line.startswith("-- answers that could not be used so far: ") and raised in line for line in lines)
    result = json.loads(last)
    assert (result["status"], result["exit_code"], result["eval_unscored"]) == ("failed", 4, 8)
    assert list(result["invalid"]) == ["ValueError"] and result["num_invalid"] >= 16 * 2
    assert "Traceback" not in run.text()


BREAKS_THE_BOOKS = """
from async_rl.data.books import Books
real = Books.close
def close(self, record, reason):
    real(self, record, reason)
    self.tokens["trained"] += reason is None
Books.close = close
"""


def test_books_that_do_not_balance_make_the_exit_code_5_of_a_run_that_went_well(tmp_path: Path, model: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAKS_THE_BOOKS)
    with train(tmp_path, *TOY, model, "num_steps=2", python_path=tmp_path) as run:
        assert run.popen.wait(200) == 5
    result = json.loads(run.text().splitlines()[-1])
    assert (result["status"], result["exit_code"], result["steps"]) == ("failed", 5, 2)
    assert not result["ledger"]["balanced"]
    assert "the books do NOT balance: " in run.text() and "the books do not balance: {" in run.text()
    assert "Traceback" not in run.text()


def test_when_the_launcher_is_killed_nothing_is_left(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TOY, model, "num_steps=1000") as run:
        run.wait_until("version 1", lambda: _version(run) >= 1, 120)
        os.kill(run.popen.pid, signal.SIGKILL)
        run.popen.wait(5)
        _assert_nothing_left(run)


def test_a_last_checkpoint_that_cannot_be_written_is_a_failure(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TOY, model, "num_steps=6", "checkpoint.every=0") as run:
        run.wait_until("version 2", lambda: _version(run) >= 2, 120)
        folder = run.run_dir / "checkpoints"
        if folder.exists():
            folder.rename(run.run_dir / "moved")
        folder.write_text("in the way")
        assert run.popen.wait(120) == 4
    assert "all steps are done, but the checkpoint of version 6 could not be written" in run.text()
    assert "Traceback" not in run.text()
    _assert_nothing_left(run)


def _damage(folder: Path) -> None:
    for shards in folder.glob("*.distcp"):
        data = bytearray(shards.read_bytes())
        data[len(data) // 2] ^= 1
        shards.write_bytes(data)


@pytest.mark.whole
def test_damaged_checkpoints_are_told_and_cost_no_row_of_a_run_that_went_well(tmp_path: Path, model: str) -> None:
    own = (*TOY, model, "checkpoint.every=2", "eval.every=2")
    with train(tmp_path, *own, "num_steps=4") as run:
        run.finish(120)
    checkpoints = run.run_dir / "checkpoints"
    _damage(checkpoints / "step_000004")
    with train(tmp_path, *own, "num_steps=6") as again:
        again.finish(120)
    assert "-- checkpoint of version 4 is skipped: " in again.text() and "resumed version 2" in again.text()

    for folder in checkpoints.glob("step_*"):
        _damage(folder)
    names = ("config.yaml", "metrics.jsonl", "timing.jsonl", "result.json", "samples/eval_000006.jsonl")
    held = {name: (run.run_dir / name).read_bytes() for name in names}
    with train(tmp_path, *own, "num_steps=8") as refused:
        assert refused.popen.wait(60) == 2
    assert "holds no checkpoint that can be used, the newest (step_000006) because " in refused.text()
    assert "checkpoint.resume=false" in refused.text() and "Traceback" not in refused.text()
    assert {name: (run.run_dir / name).read_bytes() for name in names} == held

    with train(tmp_path, *own, "num_steps=2", "checkpoint.resume=false") as anew:
        anew.finish(120)
    assert "-- of an earlier life, which this run does not continue: now " in anew.text()
    assert [row["step"] for row in anew.steps()] == [1, 2]
    for name in ("metrics.jsonl.1", "timing.jsonl.1", "samples.1/eval_000006.jsonl"):
        assert (run.run_dir / name).read_bytes() == held[name.replace(".1", "", 1)]


def test_a_disk_that_fills_under_a_run_ends_it_with_a_sentence(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TOY, model, "num_steps=1000", "observe.tensorboard=true") as run:
        run.wait_until("version 2", lambda: _version(run) >= 2, 120)
        for pid in run.pids("async_rl.learner"):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, 1))
        assert run.popen.wait(60) == 4
    assert "a row could not be written (1 in a row), and is tried again with the next: " in run.text()
    assert "3 rows in a row could not be written (checkpoint.max_failed_saves), the last to " in run.text()
    assert "Traceback" not in run.text()
    assert json.loads(run.text().splitlines()[-1])["exit_code"] == 4
    _assert_nothing_left(run)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["its folder", "a learner", "a rollout"])
def test_a_signal_during_the_start_ends_all_of_it_at_once(
    tmp_path: Path, model: str, moment: str, number: signal.Signals
) -> None:
    words = {"its folder": ("train",), "a learner": ("async_rl.learner",), "a rollout": ("async_rl.rollout",)}[moment]
    with train(tmp_path, *TOY, model, "num_steps=1000") as run:
        run.wait_until(moment, lambda: (run.run_dir / "run.json").exists() and run.pids(*words), 60)
        run.popen.send_signal(number)
        assert run.popen.wait(30) == 128 + number
    assert "Traceback" not in run.text()
    _assert_stopped(run, f"stopped by {number.name} before the first step", 128 + number)
    _assert_nothing_left(run)


def test_a_signal_while_the_model_is_made_ends_with_a_result_that_says_so(tmp_path: Path) -> None:
    with train(tmp_path, *TOY, f"model.path={tmp_path / 'made'}", "model.make=tiny", "num_steps=5") as run:
        run.wait_until("the recipe", lambda: "making the model" in run.text(), 60)
        run.popen.send_signal(signal.SIGINT)
        assert run.popen.wait(30) == 130
    _assert_stopped(run, "stopped by SIGINT while the model was made", 130)
    assert [path.name for path in tmp_path.iterdir() if "made" in path.name] == []


def test_a_second_interrupt_ends_a_run_that_would_save_at_once(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TOY, model, "num_steps=1000") as run:
        run.wait_until("version 2", lambda: _version(run) >= 2, 120)
        run.popen.send_signal(signal.SIGINT)
        run.wait_until("the first to be heeded", lambda: "once more to kill everything" in run.text(), 10)
        run.popen.send_signal(signal.SIGINT)
        assert run.popen.wait(8) == 128 + signal.SIGINT
    assert "Traceback" not in run.text()
    _assert_nothing_left(run)


@pytest.mark.parametrize("rank_dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_frozen_torchrun_holds_up_neither_the_end_of_a_run_nor_its_resume(
    tmp_path: Path, model: str, rank_dies: bool
) -> None:
    with train(tmp_path, *TOY, model, "num_steps=8", "checkpoint.every=2") as run:
        run.wait_until("version 3", lambda: _version(run) >= 3, 120)
        for pid in run.pids("async_rl.learner.torchrun"):
            os.kill(pid, signal.SIGSTOP)
        if rank_dies:
            for pid in set(run.pids("async_rl.learner")) - set(run.pids("async_rl.learner.torchrun")):
                os.kill(pid, signal.SIGKILL)
        result = run.finish(150)
    assert "torchrun, pid" in run.text() and "after its last rank and is killed" in run.text()
    assert ("resumed version" in run.text()) == rank_dies
    assert_books_balance(result, trained=32)
    _assert_nothing_left(run)
