"""The name of a rollout that a person starts is looked at before anything is loaded."""

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

from async_rl.config import Config, ConfigError, parse_config
from async_rl.launcher.by_hand import check_name
from async_rl.launcher.watching import Watch
from async_rl.observability.status import StatusFile


def config(count: int) -> Config:
    tree = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, "model": {"path": "somewhere"}}
    return parse_config({**tree, "rollout": {"count": count}})


@pytest.mark.parametrize("name", ["a b", "x/y", "", "x" * 65])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="use letters, digits, dots and dashes"):
        check_name(tmp_path, config(0), name)


def test_the_launchers_own_names_are_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout-1, which is the launcher's own \(rollout.count=2\): choose another --name"):
        check_name(tmp_path, config(2), "rollout-1")
    check_name(tmp_path, config(2), "rollout-2")
    check_name(tmp_path, config(0), "rollout-0")


def _say(run_dir: Path, pid: int, **other: object) -> None:
    StatusFile(run_dir, "early").write()
    path = run_dir / "status" / "early.json"
    born = psutil.Process(pid).create_time()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": pid, "born": born} | other))


def test_the_name_of_one_that_lives_is_taken_and_of_one_that_is_dead_or_silent_it_is_not(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        _say(tmp_path, other.pid)
        with pytest.raises(ConfigError, match=f"--name is early, and early with pid {other.pid} lives: choose another --name"):
            check_name(tmp_path, config(1), "early")
        check_name(tmp_path, config(1), "late")
        _say(tmp_path, other.pid, written=time.time() - 60.0)
        check_name(tmp_path, config(1), "early")  # frozen: the learner will say
        _say(tmp_path, other.pid, host="elsewhere")
        with pytest.raises(ConfigError, match="lives"):
            check_name(tmp_path, config(1), "early")
        _say(tmp_path, other.pid)
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait(10)
    check_name(tmp_path, config(1), "early")


def test_a_member_of_the_launchers_own_name_but_of_another_pid_is_none_of_its_own(tmp_path: Path) -> None:
    watch = Watch(tmp_path, print)
    learner = StatusFile(tmp_path, "learner-0")
    member = {"id": "rollout-0#1", "process": "rollout-0", "pid": os.getpid(), "state": "serving", "weights": "1:0"}
    learner.look = lambda: {"members": [member | {"leases": 0, "heartbeat_age_s": 0.0, "core_age_s": 0.0}]}
    learner.write()
    assert watch.others({("rollout-0", 1)}) == ["rollout-0#1"]
    assert watch.others({("rollout-0", os.getpid())}) == []
    learner.close()
    watch.close()
