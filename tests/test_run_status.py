"""`async-rl status` of a whole run: while all is well, while the learner is frozen, and when the run is over."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import ROOT, Run, random_model, train

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
TOY = (
    "rollout.engine=toy",
    "model.make=null",
    "groups_per_step=4",
    "rollout.num_slots=4",
    "eval.draws=0",
    "checkpoint.every=0",
)


def _status(run: Run, *options: str) -> dict[str, str]:
    """The rest of each line by its first word."""
    argv = [sys.executable, "-m", "async_rl", "status", str(run.run_dir), *options]
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    return {re.split(r"#| pid |: ", line)[0].strip(): line for line in lines}


def _past_zero(said: dict[str, str]) -> bool:
    return all(re.search(r"weights 1:[1-9]", said.get(name, "")) for name in ("learner-0", "rollout-0"))


def test_a_run_is_told_process_by_process_also_while_the_learner_is_frozen(tmp_path: Path) -> None:
    model = f"model.path={random_model(tmp_path / 'random')}"
    with train(tmp_path, *TOY, model, "num_steps=100000") as run:
        run.wait_until("a step", run.steps, 120)
        run.wait_until("a second for it to be written", lambda: _past_zero(_status(run)), 60)
        said = _status(run, "--stacks")
        assert f"pid {run.popen.pid}  watching" in said["launcher"]
        assert re.search(r"pid \d+  \w+.*  weights 1:[1-9]", said["learner-0"])
        assert re.search(
            r"rollout-0#1 +pid \d+  \w+.*  weights 1:\d+  \d leases, \d unacknowledged  heard by the learner \d",
            said["rollout-0"],
        )
        assert re.search(r"groups: \d+ granted, \d+ waiting, .* trained, 0 dropped$", said["groups"])
        for name in ("launcher", "learner-0", "rollout-0"):
            assert said[f"stacks of {name}"].endswith(f"logs/{name}.log")
            log = run.run_dir / "logs" / f"{name}.log"
            run.wait_until("stacks", lambda log=log: "(most recent call first)" in log.read_text(), 20)
        (learner,) = [pid for pid in run.pids("async_rl.learner") if f"pid {pid} " in said["learner-0"]]
        os.kill(learner, signal.SIGSTOP)
        run.wait_until("its books to be old", lambda: "(as of " in _status(run)["groups"], 30)
        assert "FROZEN (state T), no sign of life for " in _status(run)["learner-0"]
        assert "FROZEN" not in _status(run)["rollout-0"]
        os.kill(learner, signal.SIGCONT)
        run.popen.send_signal(signal.SIGTERM)
        assert run.popen.wait(60) == 128 + signal.SIGTERM
        (line,) = _status(run).values()
    assert re.match(r"no run is going on in .*: the last one stopped with exit code 143: stopped by SIGTERM; checkpoint", line)
