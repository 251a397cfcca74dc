"""The launcher with real processes and real signals; what it starts are stand-ins (launcher_fakes.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

FAKES = Path(__file__).with_name("launcher_fakes.py")


class Launched:
    """A launcher over stand-ins, in a session of its own; killed at the end of the test whatever happens."""

    def __init__(self, folder: Path, learner: str, rollout: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(FAKES), "launcher", learner, rollout, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, timeout_s: float = 60) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def pids(self, role: str) -> list[int]:
        return [int(path.suffix[1:]) for path in self.folder.glob(f"{role}.*")]

    def wait_for(self, role: str, timeout_s: float = 40) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.pids(role):
            assert time.monotonic() < deadline and self.process.poll() is None, f"{role} did not start"
            time.sleep(0.02)

    def survivors(self) -> list[int]:
        """Of all processes that ran for it, those that live 5 s later."""
        pids = [pid for role in ("learner", "rank", "rollout") for pid in self.pids(role)]
        if (self.folder / "helper").exists():
            pids.append(int((self.folder / "helper").read_text()))
        deadline = time.monotonic() + 5
        while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def launch(tmp_path):
    running: list[Launched] = []

    def start(learner: str, rollout: str) -> Launched:
        running.append(Launched(tmp_path / "run", learner, rollout))
        return running[-1]

    yield start
    for launched in running:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.wait(10)
        for pid in launched.survivors():
            os.kill(pid, signal.SIGKILL)


def test_progress_goes_to_the_terminal_and_the_log_and_the_last_line_is_the_result(launch):
    run = launch("succeeds", "waits_for_end")
    code, out, err = run.end()
    assert (code, err.count("Traceback")) == (0, 0), err
    assert out.splitlines()[0] == "step 1/1"
    assert json.loads(out.splitlines()[-1]) == {"reward_last": 1.0}
    assert "step 1/1" in (run.folder / "logs" / "learner.log").read_text()
    assert run.survivors() == []


def test_a_learner_that_fails_ends_the_run_with_its_code_and_its_last_words_once(launch):
    run = launch("fails", "with_helper")
    code, _, err = run.end()
    assert code == 4
    assert err.count("the loss is not finite") == 1 and "logs/learner.log" in err
    assert run.survivors() == [], "a helper that ignores SIGTERM outlived the run"


def test_a_rollout_that_breaks_the_same_way_twice_ends_the_run_within_15_s(launch):
    begin = time.monotonic()
    run = launch("stoppable", "breaks")
    code, _, err = run.end()
    assert code == 3 and time.monotonic() - begin < 15 + 10  # 10 s for three Pythons to start on a busy machine
    assert len(run.pids("rollout")) == 2, "one second chance, then no more of the same"
    assert "the engine refuses this model" in err and "logs/rollout-0.log" in err
    assert json.loads((run.folder / "heard.json").read_text()) == [signal.SIGTERM], "the learner was asked to stop"
    assert run.survivors() == []


def test_a_rollout_that_is_killed_is_started_again(launch):
    run = launch("waits_for_second_rollout", "killed_once")
    code, out, err = run.end()
    assert code == 0, err
    assert "rollout-0 was killed by SIGKILL; starting it again (1 of 3)" in err
    assert json.loads(out.splitlines()[-1]) == {"reward_last": 1.0}


def test_a_learner_that_is_killed_is_started_again_when_there_is_a_checkpoint(launch):
    run = launch("killed_once", "waits_for_end")
    code, out, err = run.end()
    assert code == 0, err
    assert len(run.pids("learner")) == 2 and "from its checkpoint (1 of 3)" in err
    assert out.splitlines()[:-1] == ["step 1/1"]


def test_ctrl_c_reaches_each_rank_once_and_the_run_ends_when_it_has_saved(launch):
    run = launch("torchrun", "waits_for_end")
    run.wait_for("rank")
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 130, err
    assert json.loads((run.folder / "heard.json").read_text()) == [signal.SIGINT]
    assert "Traceback" not in err and run.survivors() == []


def test_a_second_ctrl_c_kills_a_learner_that_does_not_listen(launch):
    run = launch("deaf", "with_helper")
    run.wait_for("learner")
    run.wait_for("rollout")
    time.sleep(0.5)  # for its handlers
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.process.poll() is None, "the first one waits for the learner"
    run.process.send_signal(signal.SIGINT)
    assert run.end(30)[0] == 130
    assert run.survivors() == []


def test_everything_dies_with_a_launcher_that_is_killed(launch):
    run = launch("torchrun", "waits_for_end")
    run.wait_for("rank")
    run.wait_for("rollout")
    run.process.kill()
    run.process.wait(10)
    assert run.survivors() == []


def test_a_run_folder_takes_one_run_at_a_time(launch, tmp_path):
    first = launch("stoppable", "waits_for_end")
    first.wait_for("rank")
    second = subprocess.run(
        [sys.executable, str(FAKES), "launcher", "succeeds", "waits_for_end", str(first.folder)], capture_output=True, text=True
    )
    assert second.returncode != 0 and "another run is at work" in second.stderr
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 143


@pytest.mark.process
def test_torchrun_ends_with_the_code_of_the_rank_that_failed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "async_rl.learner.torchrun", "1", str(tmp_path)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 2, done.stderr  # no config.yaml there
    assert "config.yaml" in done.stderr and "ChildFailedError" not in done.stderr
