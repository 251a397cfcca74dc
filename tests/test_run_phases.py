"""Members that freeze, die, leave and join in the very middle of each phase of a weight update: whole runs of toy engines."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from benchmarks.freezes import ALLOWANCE_S, PHASES, Tail, freeze, scene

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(600)]
PHASE_TIMEOUT_S = 6.0
TOY = ("rollout.engine=toy", f"weights.phase_timeout_s={PHASE_TIMEOUT_S:g}")


@pytest.mark.parametrize("phase", PHASES)
def test_a_member_that_freezes_is_named_with_the_phase_and_the_update_completes_without_it(tmp_path: Path, phase: str) -> None:
    with scene(tmp_path, *TOY, by_hand=("toy-0", "toy-1")) as found:
        case = freeze(found, "toy-0", phase)
        stacks = (found.run_dir / "logs" / "toy-0.log").read_text()
        learner = found.learner_log.read_text()
    assert case["published_after_s"] < PHASE_TIMEOUT_S + ALLOWANCE_S
    assert phase in case["named"] and case["named"].startswith("toy-0#")
    assert case["trained_on"], "the update it came back with, whose checksum was right, was not the last"
    assert "Current thread" in stacks, "when it woke and heard of it, it wrote what it was doing"
    assert f"is expelled: {case['named'].partition('expelled: ')[2][:20]}" in learner and "Current thread" in learner
    assert "Traceback" not in (tmp_path / "output.txt").read_text()


def test_members_that_die_leave_and_join_in_each_phase_cost_no_update(tmp_path: Path) -> None:
    with scene(tmp_path, *TOY, by_hand=("dies", "leaves")) as found:
        for phase in PHASES:
            learner = Tail(found.learner_log)
            found.at_phase("dies", phase)
            os.kill(found.pid("dies"), signal.SIGKILL)
            version = found.published(learner, {"rollout-0", "leaves"}, PHASE_TIMEOUT_S + ALLOWANCE_S)
            found.at_phase("leaves", phase)
            found.popens["leaves"].send_signal(signal.SIGTERM)
            assert found.published(learner, {"rollout-0"}, PHASE_TIMEOUT_S + ALLOWANCE_S) >= version
            assert found.popens["leaves"].wait(20) == 128 + signal.SIGTERM
            with found.hidden():
                for name in ("dies", "leaves"):
                    found.start(name)
                for name in ("dies", "leaves"):
                    Tail.whole(found.outputs[name]).find("looking for the learner", 120)
                found.at_phase("rollout-0", phase)
            found.published(learner, {"rollout-0", "dies", "leaves"})
        found.popen.send_signal(signal.SIGINT)
        assert found.popen.wait(60) == 128 + signal.SIGINT
    result = json.loads((tmp_path / "output.txt").read_text().splitlines()[-1])
    assert result["ledger"]["balanced"] and result["lag_max"] <= 2
    assert "left: it was stopped" in found.learner_log.read_text()
