"""The KL gate as a machine: patience, hysteresis, actions, what they change, and which checkpoints it trusts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config.algorithm import KLConfig
from async_rl.learner.update.gate import Gate, Phase
from async_rl.learner.update.steering import Steering

GOLDEN = {c["name"]: c for c in json.loads((Path(__file__).parent / "golden" / "algorithms.json").read_text())}
RUNNING, PAUSED, PROBATION = Phase.RUNNING, Phase.PAUSED, Phase.PROBATION


def make_gate(**changes: Any) -> Gate:
    return Gate(KLConfig(**{"gate": 10.0, "gate_patience": 2, "gate_resume_ratio": 0.5, "gate_action": "halve_lr"} | changes))


def phases(gate: Gate, *kls: float, num_answers: int = 8) -> list[Phase]:
    """After each step, with the action done at once after each pause that has one."""
    found = []
    for version, kl in enumerate(kls):
        gate.measured(kl, version, num_answers)
        found.append(gate.phase)
        if gate.phase is PAUSED and not gate.exhausted:
            gate.act()
    return found


def test_the_alarm_begins_and_ends_as_in_the_golden_case() -> None:
    case = GOLDEN["kl_gate"]
    given_, states = case["inputs"], case["expected"]["state"]
    gate = make_gate(
        gate=given_["threshold"], gate_patience=given_["patience"], gate_resume_ratio=given_["resume_ratio"], gate_action="wait"
    )
    found = phases(gate, *given_["seq_kl"])
    assert ["run" if phase is RUNNING else "paused" for phase in found] == states
    assert found[-3:] == [PAUSED, PROBATION, RUNNING], "paused for the action alone: a frozen policy would keep its KL"


@pytest.mark.parametrize(
    ("kls", "expected"),
    [
        ((10.0, 10.0, 10.0), [RUNNING, RUNNING, RUNNING]),
        ((11.0, 10.0, 11.0), [RUNNING, RUNNING, RUNNING]),
        ((11.0, 11.0, 5.0, 4.9), [RUNNING, PAUSED, PROBATION, RUNNING]),
        ((math.nan, math.nan, math.nan, 0.0), [RUNNING, PAUSED, PROBATION, RUNNING]),
        ((math.inf, 11.0, -3.0), [RUNNING, PAUSED, RUNNING]),
        ((11.0, 11.0, 11.0, 9.0, 11.0, 11.0), [RUNNING, PAUSED, PROBATION, PROBATION, PROBATION, PAUSED]),
        ((11.0, 11.0, 4.0, 11.0, 11.0), [RUNNING, PAUSED, RUNNING, RUNNING, PAUSED]),
    ],
    ids=[
        "at the gate",
        "not in a row",
        "below half",
        "nan is above",
        "inf and below zero",
        "again on probation",
        "a new alarm",
    ],
)
def test_patience_and_hysteresis(kls: tuple[float, ...], expected: list[Phase]) -> None:
    assert phases(make_gate(), *kls) == expected


def test_without_a_gate_nothing_is_ever_paused() -> None:
    gate = make_gate(gate=None)
    assert set(phases(gate, *[1e9] * 10)) == {RUNNING} and gate.steering == Steering(1.0, 0.0)


def test_after_three_actions_in_one_alarm_the_fourth_pause_has_none_left() -> None:
    gate = make_gate()
    assert phases(gate, *[20.0] * 8) == [RUNNING, PAUSED] + 3 * [PROBATION, PAUSED]
    assert gate.exhausted and gate.num_actions == 3
    assert "the KL to the reference is 20 nats per answer, above algorithm.kl.gate=10 for 2 steps in a row" in gate.verdict()
    assert "gate_action=halve_lr, 3 times" in gate.verdict()


def test_an_alarm_that_ended_gives_all_actions_back() -> None:
    gate = make_gate()
    phases(gate, *[20.0] * 6, 1.0, *[20.0] * 6)
    assert not gate.exhausted and gate.num_actions == 3


def test_a_run_that_was_given_up_and_is_started_again_has_all_its_actions() -> None:
    gate = make_gate()
    phases(gate, *[20.0] * 8)
    gate.forgive()
    assert gate.phase is PROBATION and gate.steering.lr_scale == 1 / 8
    assert phases(gate, 20.0, 20.0) == [PROBATION, PAUSED] and gate.num_actions == 1


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("halve_lr", Steering(0.25, 0.1)),
        ("double_beta", Steering(1.0, 0.4)),
        ("wait", Steering(1.0, 0.1)),
        ("roll_back", Steering(1.0, 0.1)),
    ],
)
def test_each_action_changes_one_thing_and_keeps_it_after_the_alarm(action: str, expected: Steering) -> None:
    gate = make_gate(gate_action=action, beta=0.1)
    phases(gate, *[20.0] * 4, 1.0, 1.0)
    assert (gate.phase, gate.steering) == (RUNNING, expected)


def test_beta_moves_towards_its_target_by_the_answers_of_each_step_also_in_an_alarm() -> None:
    gate = make_gate(gate_action="double_beta", beta=0.2, target=6.0, horizon=10_000)
    seen = []
    for kl in (9.0, 3.0, math.nan, 6.3, 20.0):
        gate.measured(kl, 0, 256)
        seen.append(gate.steering.kl_beta)
    assert seen[0] == pytest.approx(0.201024) and seen[1] == pytest.approx(0.201024 * (1 - 0.2 * 256 / 1e4))
    assert seen[2] == seen[1] and seen[3] == pytest.approx(seen[2] * (1 + 0.05 * 256 / 1e4))
    gate.measured(20.0, 0, 256)
    assert gate.phase is PAUSED
    before = gate.steering.kl_beta
    gate.act()
    assert gate.steering == Steering(1.0, 2 * before)


def test_beta_is_steered_without_a_gate_too() -> None:
    gate = make_gate(gate=None, beta=0.2, target=6.0)
    gate.measured(60.0, 0, 1000)
    assert gate.steering.kl_beta == pytest.approx(0.2 * 1.02)


KLS = st.lists(st.sampled_from([1.0, 4.9, 5.0, 10.0, 10.1, 50.0, math.nan]), max_size=40)


@settings(max_examples=200, deadline=None)
@given(KLS, st.integers(1, 3))
def test_it_is_the_machine_that_a_few_counters_make(kls: list[float], patience: int) -> None:
    gate = make_gate(gate_patience=patience)
    alarm, above, actions, stuck, expected = False, 0, 0, False, []
    for kl in kls:
        if alarm and kl < 5.0:
            alarm, above, actions, stuck = False, 0, 0, False
        else:
            above = above + 1 if not kl <= 10.0 else 0
        paused = stuck or above >= patience
        alarm = alarm or paused
        expected.append(PAUSED if paused else PROBATION if alarm else RUNNING)
        stuck = paused and actions == 3
        if paused and not stuck:
            above, actions = 0, actions + 1
    assert phases(gate, *kls) == expected
    assert gate.num_actions == actions


@settings(max_examples=100, deadline=None)
@given(KLS, st.integers(0, 40), st.booleans())
def test_a_gate_that_went_through_a_checkpoint_goes_on_as_it_would_have(kls: list[float], at: int, acted: bool) -> None:
    options: dict[str, Any] = {"gate_action": "double_beta", "beta": 0.3, "target": 6.0, "horizon": 100}
    gate, again = make_gate(**options), make_gate(**options)
    gate.saved(3)
    phases(gate, *kls[:at])
    if gate.phase is PAUSED and acted:
        gate.act()
    again.load_state_dict(msgpack.unpackb(msgpack.packb(gate.state_dict()) or b""))
    assert (again.phase, again.steering, again.sound, again.num_actions) == (
        gate.phase,
        gate.steering,
        gate.sound,
        gate.num_actions,
    )
    assert phases(again, *kls[at:]) == phases(gate, *kls[at:])
    assert again.steering == gate.steering


def test_a_beta_or_gate_that_is_configured_anew_counts_after_a_resume() -> None:
    gate = make_gate(gate_action="double_beta", beta=0.1)
    phases(gate, 20.0, 20.0)
    again, without = make_gate(gate_action="double_beta", beta=0.7), make_gate(gate=None, beta=0.1)
    for other in (again, without):
        other.load_state_dict(gate.state_dict())
    assert (again.steering, again.phase) == (Steering(1.0, 0.7), PROBATION)
    assert (without.steering, without.phase) == (Steering(1.0, 0.2), RUNNING)


def test_a_checkpoint_is_sound_when_its_own_kl_was_found_at_the_gate_or_below_without_an_alarm() -> None:
    gate, sound = make_gate(), []
    for version, kl in enumerate([1.0, 10.0, 11.0, 3.0, 11.0, 11.0, 7.0, 7.0, 1.0]):
        gate.saved(version)
        gate.measured(kl, version, 8)
        sound.append(gate.sound)
        if gate.phase is PAUSED:
            gate.act()
    assert sound[:6] == [(0,), (0, 1), (0, 1), (0, 1, 3), (0, 1, 3), (0, 1, 3)]
    assert sound[6:] == [(0, 1, 3), (0, 1, 3), (1, 3, 8)], "none that was made on probation, unless its own KL ended that"
    assert gate.spared == {8}


def test_a_version_without_a_checkpoint_is_nothing_to_go_back_to() -> None:
    gate = make_gate()
    gate.saved(4)
    phases(gate, 1.0, 1.0, 1.0)
    assert gate.sound == () and gate.spared == set()
    gate.measured(1.0, 4, 8)
    gate.measured(1.0, 4, 8)
    assert gate.sound == (4,), "once, also when a step that changed nothing is done again"


def test_a_checkpoint_is_judged_by_the_policy_it_holds_also_after_steps_that_trained_only_the_critic() -> None:
    gate = make_gate(gate_action="roll_back")
    gate.saved(0)
    for version in (0, 1, 2):
        gate.unchanged(version)
    gate.measured(1.0, 3, 8)
    assert gate.sound == (0,)
    gate.measured(1.0, 4, 8)
    gate.unchanged(7)  # of a policy that has moved on
    gate.measured(1.0, 8, 8)
    assert gate.sound == (0,)
