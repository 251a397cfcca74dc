"""Status files and stacks: what a process says of itself, and what is said of one that cannot any more."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_rl.launcher.status import status
from async_rl.observability import stacks
from async_rl.observability.status import StatusFile, forget, read

PROCESS = """
import logging, sys, threading
from pathlib import Path
from async_rl.observability import stacks, status, waiting
logging.basicConfig(filename=sys.argv[1] + "/words", format="%(message)s")
status.EVERY_S = status.SHORT_S = 0.05
file = status.StatusFile(Path(sys.argv[1]), "rollout-0")
file.look = lambda: {"state": "sampling", "weights": "1:7", "leases": 3, "unacknowledged": 1}
file.start()
with waiting.waiting("the moon"):
    for line in sys.stdin:
        stacks.dump(line.strip())
        print("told", flush=True)
"""


@contextmanager
def process(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of the run that waits for the moon, and dumps its stacks at every line it is given."""
    argv = [sys.executable, "-c", PROCESS, str(run_dir)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            until(lambda: any("the moon" in line for line in status(run_dir)))
            yield child
        finally:
            child.kill()


def until(ready, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_says_what_it_does_and_waits_for_and_is_dead_when_it_was_killed(tmp_path: Path):
    with process(tmp_path) as child:
        (line,) = status(tmp_path)
        assert f"rollout-0      pid {child.pid}  sampling  weights 1:7  3 leases, 1 unacknowledged" in line
        assert "not known to the learner" in line and "for the moon" in line
    (line,) = status(tmp_path)
    assert line.endswith("the last one came to no end of its own, rollout-0 were killed")
    other = StatusFile(tmp_path, "launcher")
    other.write()
    said = status(tmp_path)
    assert "DEAD, it said its last word" in said[1] and "DEAD" not in said[0]


def test_a_stopped_process_is_frozen_at_once_and_well_when_it_goes_on(tmp_path: Path):
    with process(tmp_path) as child:
        child.send_signal(signal.SIGSTOP)
        until(lambda: "FROZEN (state T), no sign of life for " in status(tmp_path)[0])
        child.send_signal(signal.SIGCONT)
        until(lambda: "FROZEN" not in status(tmp_path)[0])


def test_one_that_writes_no_more_is_told_from_one_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with process(tmp_path):
        monkeypatch.setattr("async_rl.launcher.status.QUIET_S", -1.0)
        assert "NO SIGN OF LIFE for " in status(tmp_path)[0]


def test_a_member_elsewhere_is_known_from_the_learner_and_books_are_told(tmp_path: Path):
    member = {"id": "far#2", "process": "far", "pid": 7, "state": "idle", "weights": "1:4", "leases": 2}
    member |= {"heartbeat_age_s": 0.5, "core_age_s": 0.1}
    file = StatusFile(tmp_path, "learner-0")
    file.look = lambda: {"members": [member], "ledger": {"granted": 9, "dropped": {"stale": 1, "failed": 2}}}
    file.write()
    said = status(tmp_path)
    assert said[1].startswith("far#2          pid 7 elsewhere  idle  weights 1:4  2 leases  heard by the learner 0.")
    assert said[2] == "groups: 9 granted, 3 dropped"


def test_a_full_disk_costs_the_word_and_nothing_else(tmp_path: Path):
    file = StatusFile(tmp_path, "rollout-0")
    file.write()
    before = read(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        file.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert read(tmp_path) == before
    file.close()
    file.write()
    assert read(tmp_path) == []


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (
            {"status": "finished", "exit_code": 0, "reason": "9 steps done"},
            "the last one finished with exit code 0: 9 steps done",
        ),
        (None, "none has been started, or the last one was killed"),
    ],
)
def test_without_a_run_it_says_how_the_last_one_ended(tmp_path: Path, result, words: str):
    if result:
        (tmp_path / "result.json").write_text(json.dumps(result))
    assert status(tmp_path) == [f"no run is going on in {tmp_path}: {words}"]


@pytest.mark.parametrize(
    "junk",
    [
        *({"written": "yesterday"}, {"written": None}, {"pid": "12"}, {"pid": True}, {"waits": 3}, {"core": "q"}),
        *({"members": None}, {"members": [1]}, {"members": [{"id": "x"}]}, {"leases": "2"}),
    ],
)
def test_a_file_that_no_process_wrote_is_as_good_as_none(tmp_path: Path, junk: dict):
    file = StatusFile(tmp_path, "learner-0")
    file.look = lambda: junk
    file.write()
    assert status(tmp_path)[0].startswith(f"no run is going on in {tmp_path}")


def test_neither_depth_nor_a_pipe_nor_an_odd_pid_holds_up_status(tmp_path: Path):
    file = StatusFile(tmp_path, "rollout-0")
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "deep.json").write_text("[" * 200_000)
    os.mkfifo(tmp_path / "status" / "pipe.json")
    for pid in (-5, 0, 1 << 80):
        file.look = lambda pid=pid: {"pid": pid}
        file.write()
        assert status(tmp_path)[0].startswith("no run is going on")


def test_what_an_earlier_life_has_left_is_forgotten(tmp_path: Path):
    StatusFile(tmp_path, "rollout-0").write()
    forget(tmp_path)
    assert read(tmp_path) == []
    forget(tmp_path / "absent")


def test_stacks_are_asked_for_by_a_signal_that_kills_nobody_who_does_not_listen(tmp_path: Path):
    log = tmp_path / "logs" / "rollout-0.log"
    with process(tmp_path) as child:
        said = status(tmp_path, with_stacks=True)
        assert said[-1] == f"stacks of rollout-0: {log}"
        until(lambda: "Current thread" in log.read_text() and "in wait" in log.read_text())
        assert child.poll() is None
    with subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        assert not stacks.ask(deaf.pid)
        deaf.communicate(b"\n", 10)
        assert deaf.returncode == 0
    assert not stacks.ask(deaf.pid)


def test_a_deadline_leaves_stacks_and_waits_in_the_log_but_many_at_once_leave_them_once(tmp_path: Path):
    log = tmp_path / "logs" / "rollout-0.log"
    with process(tmp_path) as child:
        assert child.stdin is not None and child.stdout is not None
        for _ in range(3):
            print("rollout-1#1 is expelled", file=child.stdin, flush=True)
            child.stdout.readline()
        words = (tmp_path / "words").read_text()
    assert log.read_text().count("Current thread") == 1
    assert words.count("rollout-1#1 is expelled; waiting ") == 1 and "for the moon; the stacks of all threads" in words


def test_a_fork_begins_without_the_waits_of_its_parent_and_listens_for_stacks(tmp_path: Path):
    program = (
        "import os, sys; from pathlib import Path; from async_rl.observability import stacks, waiting\n"
        "stacks.register(Path(sys.argv[1]))\n"
        "with waiting.waiting('a fork'):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: os._exit(len(waiting.current()) + 2 * (not stacks.ask(os.getpid())))\n"
        "    assert os.waitpid(pid, 0)[1] == 0 and len(waiting.current()) == 1\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "log")], check=True, timeout=60)
    assert "Current thread" in (tmp_path / "log").read_text()


def test_a_folder_that_is_no_run_is_a_mistake(tmp_path: Path):
    argv = [sys.executable, "-m", "async_rl", "status", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.returncode == 2
    assert done.stderr == f"async-rl: {tmp_path} holds no run.json: give the folder of a run, as `async-rl train` makes it\n"
