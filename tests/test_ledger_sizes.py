"""How many answers a group has: decided when it is granted first, for the step that will take it, and never again."""

from __future__ import annotations

import dataclasses

import pytest

from async_rl.algorithms.schedules import group_size_at, num_prompts
from async_rl.data.ledger import Ledger
from async_rl.data.record import Record
from async_rl.types import Prompt
from tests.ledger_samples import make_group, make_prompt, make_rules, reload

ROLLOUT = "rollout-0#1"
STEPS, ANSWERS = 9, 16


def answers(step: int) -> int:
    return group_size_at(step, STEPS, 2, 8)


class Dealt:
    """Deals by that schedule, and remembers for which step each group was."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, step: int) -> tuple[Prompt, int]:
        self.steps.append(step)
        return make_prompt(len(self.steps)), answers(step)


def started(staleness: int, **changes) -> Ledger:
    rules = make_rules(
        max_staleness=staleness, num_steps=STEPS, groups_per_step=lambda k: num_prompts(ANSWERS, answers(k)), **changes
    )
    ledger = Ledger(rules, 1)
    ledger.committed(ROLLOUT, 0)
    return ledger


def fill(ledger: Ledger, deal: Dealt) -> list[Record]:
    granted = []
    while (record := ledger.grant(ROLLOUT, deal, 0.0)) is not None:
        granted.append(record)
    return granted


def deliver(ledger: Ledger, record: Record) -> None:
    assert ledger.accept(make_group(record, [ledger.released or 0]), 60, 0.0).outcome == "accepted"


def step(ledger: Ledger) -> list[Record]:
    batch = ledger.take(ledger.version)
    assert batch is not None, ledger.why_not(ledger.version, 0.0)
    ledger.trained([r.group_id for r in batch], ledger.version + 1)
    ledger.committed(ROLLOUT, ledger.version)
    return batch


@pytest.mark.parametrize("staleness", [0, 1, 2, 5, 20])
def test_every_step_has_the_same_number_of_answers_in_groups_of_its_own_size(staleness: int):
    ledger, deal = started(staleness), Dealt()
    for version in range(STEPS):
        for record in fill(ledger, deal):
            deliver(ledger, record)
        assert [record.size for record in step(ledger)] == [answers(version)] * (ANSWERS // answers(version))
    assert deal.steps == [k for k in range(STEPS) for _ in range(ANSWERS // answers(k))]


def test_a_group_granted_while_a_batch_is_taken_is_dealt_for_a_later_step():
    ledger, deal = started(staleness=1), Dealt()
    for record in fill(ledger, deal):
        deliver(ledger, record)
    assert deal.steps == [0] * 8 + [1] * 8
    batch = ledger.take(0)
    assert batch is not None and not fill(ledger, deal)
    ledger.drop([record.group_id for record in ledger._shelves.untaken()][:3], "failed")
    fill(ledger, deal)
    assert deal.steps[16:] == [1, 1, 1], "step 0 has its batch: what replaces a dropped group goes into step 1"


def test_a_group_that_is_leased_again_has_as_many_answers_as_before():
    ledger, deal = started(staleness=3), Dealt()
    records = fill(ledger, deal)
    sizes = {record.group_id: record.size for record in records}
    assert set(sizes.values()) == {2, 4}
    ledger.expire(1000.0)
    again = fill(ledger, deal)
    assert {record.group_id: record.size for record in again} == sizes and len(deal.steps) == len(sizes)
    assert {record.attempt.n for record in again} == {1}
    other = reload(ledger, incarnation=2)
    other.committed(ROLLOUT, 0)
    resumed = fill(other, deal)
    assert {record.group_id: record.size for record in resumed} == sizes and len(deal.steps) == len(sizes)


def test_a_group_that_is_cancelled_for_its_age_keeps_its_size():
    ledger, deal = started(staleness=0, on_stale="cancel"), Dealt()
    record = fill(ledger, deal)[0]
    record.size = 5
    record.born = -1
    ledger.cancel_stale(0)
    again = ledger.grant(ROLLOUT, deal, 0.0)
    assert again is not None and (again.group_id, again.attempt.n, again.size) == (record.group_id, 1, 5)


@pytest.mark.parametrize("max_attempts", [1, 3])
@pytest.mark.parametrize("more", [1, -1])
def test_groups_that_need_other_answers_after_a_resume_wait_for_them_and_none_is_lost(more: int, max_attempts: int):
    """Waiting, leased, ready and taken ones alike: none may be taken as it was, and no old attempt may deliver."""
    ledger = started(staleness=3, max_attempts=max_attempts)
    records = fill(ledger, Dealt())
    for record in records[:12]:
        deliver(ledger, record)
    if max_attempts > 1:
        records[14].deadline_s = -1.0
        assert [record.group_id for record in ledger.expire(0.0)] == [14]
    assert ledger.take(0) is not None
    leased = dataclasses.replace(records[15])
    other = reload(ledger, incarnation=2, more_answers=more)
    books = other.books()
    assert books["balanced"] and books["groups"]["waiting"] == len(records) and not books["groups"]["dropped"]["failed"]
    assert books["tokens"]["dropped"]["filtered"] == books["tokens"]["received"] > 0 == books["tokens"]["ready"]
    assert other.reserved_bytes == len(records) * other.rules.max_group_bytes
    other.committed(ROLLOUT, 0)
    late = [make_group(r, [0]) for r in (leased, dataclasses.replace(leased, size=leased.size + more))]
    assert {other.accept(group, 60, 0.0).reason for group in late} == {"unknown_attempt"}
    again = fill(other, Dealt())
    assert [(r.group_id, r.prompt.prompt_id, r.size) for r in again] == [
        (r.group_id, r.prompt.prompt_id, r.size + more) for r in sorted(records, key=lambda r: r.group_id)
    ]
    for record in again:
        deliver(other, record)
    while other.version < 4:
        step(other)
    assert other.books()["balanced"] and other.books()["groups"]["trained"] == len(records)


@pytest.mark.parametrize("num", [0, 1, 3])
def test_a_delivery_of_another_number_of_answers_is_refused_and_its_attempt_ends(num: int):
    ledger = started(staleness=0)
    record = fill(ledger, Dealt())[0]
    group = make_group(record, [0])
    other = dataclasses.replace(group, trajectories=group.trajectories[:1] * num)
    assert ledger.accept(other, 60, 0.0) == ("refused", "group_size", None)
    assert record.num_tries == 1 and ledger.books()["refused"] == {"group_size": 1}
    assert ledger.accept(group, 60, 0.0).outcome == "accepted", "the whole group of the same attempt may still come"
    assert ledger.books()["balanced"]
