"""A whole run under a few faults, as `benchmarks/chaos` plays them by the dozen, in namespaces of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .runs import ROOT

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(900)]


def test_a_run_of_two_ranks_and_three_rollouts_outlives_five_faults() -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--seed", "1", "--faults", "5", "--compare", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["faults"], line["survived"], line["exit_code"]) == (5, 5, 0)
    assert (line["lost"], line["doubled"], line["orphans"], line["unexplained_stalls"]) == (0, 0, 0, 0)
