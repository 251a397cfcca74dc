"""The learner killed again and again in one run: nothing is lost or doubled, and the rollouts are the same all along."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from .runs import ROOT

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(900)]


def test_three_kills_of_the_learner_lose_and_double_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.learner_kills", "--kills", "3", "--seed", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=850, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["kills"], found["same_rollouts"], found["lives"] >= 3) == (3, True, True)
    assert (found["balanced"], found["steps"], found["versions"]) == (True, True, True)
    assert found["trained"] == found["expected"] == found["in_record"] and found["epochs"] > 1 and found["lag_max"] <= 2
    assert found["lost"] == found["doubled"] == found["prompts_twice_in_an_epoch"] == found["prompts_not_as_dealt"] == 0
    assert sum(found["refused_of_lost_timelines"].values()) >= 1
    assert found["ok"] and done.returncode == 0
