"""What the ledger makes of each delivery, and of attempts that come to nothing."""

from __future__ import annotations

import pytest

from async_rl.data.ledger import Ledger
from async_rl.data.record import LedgerError, Record, State
from async_rl.types import Attempt
from tests.ledger_samples import counter, make_group, make_rules, reload, unpack_group

ROLLOUT = "rollout-0#1"


def started(incarnation: int = 1, version: int = 0, **changes) -> Ledger:
    ledger = Ledger(make_rules(**changes), incarnation, version)
    ledger.committed(ROLLOUT, version)
    return ledger


def grant(ledger: Ledger, prompts=None, now: float = 0.0) -> Record:
    record = ledger.grant(ROLLOUT, prompts or counter(), now)
    assert record is not None
    return record


def verdict(ledger: Ledger, group) -> tuple[str, str]:
    result = ledger.accept(group, 60, 0.0)
    assert ledger.books()["balanced"], ledger.books()
    return result.outcome, result.reason


def test_the_first_delivery_is_accepted_and_every_further_one_is_a_duplicate():
    ledger = started(groups_per_step=1)
    record = grant(ledger)
    group = make_group(record, [0, 0, 0])
    assert verdict(ledger, group) == ("accepted", "")
    assert verdict(ledger, group) == ("duplicate", "ready")
    ledger.take(0)
    assert verdict(ledger, group) == ("duplicate", "taken")
    ledger.trained([record.group_id], 1)
    assert verdict(ledger, group) == ("duplicate", "trained")
    tokens = ledger.books()["tokens"]
    assert (tokens["received"], tokens["trained"], tokens["duplicate"]) == (24, 6, 18)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"group_id": 99}, "unknown_group"),
        ({"group_id": -1}, "unknown_group"),
        ({"group_id": 1 << 62}, "unknown_group"),
        ({"split": "eval"}, "not_for_training"),
        ({"attempt": Attempt(1, 1)}, "unknown_attempt"),
        ({"attempt": Attempt(2, 0)}, "unknown_attempt"),
        ({"attempt": Attempt(0, 0)}, "unknown_attempt"),
        ({"attempt": Attempt(1, -1)}, "unknown_attempt"),
    ],
)
def test_a_delivery_that_no_lease_allows_is_refused_and_ends_no_attempt(change, reason):
    ledger = started()
    record = grant(ledger)
    assert verdict(ledger, make_group(record, [0], **change)) == ("refused", reason)
    assert record.state is State.LEASED and ledger.books()["refused"] == {reason: 1}
    assert verdict(ledger, make_group(record, [0])) == ("accepted", "")


@pytest.mark.parametrize(
    ("versions", "incarnations", "change", "reason"),
    [
        ([0], 1, {"prompt_ids": [7, 7, 7]}, "prompt_mismatch"),
        ([0, 1], 1, {}, "unknown_version"),
        ([0], 2, {}, "unknown_version"),
        ([0], -1, {}, "unknown_version"),
        ([-1], 1, {}, "older_than_lease"),
    ],
)
def test_an_unfit_delivery_ends_its_attempt_and_the_group_is_leased_again(versions, incarnations, change, reason):
    ledger = started()
    record = grant(ledger)
    assert verdict(ledger, make_group(record, versions, incarnations, **change)) == ("refused", reason)
    assert record.state is State.WAITING and record.attempt == (1, 1)
    again = grant(ledger)
    assert again is record and verdict(ledger, make_group(again, [0])) == ("accepted", "")


def test_a_caller_may_refuse_a_group_for_its_own_reason():
    ledger = started(max_attempts=1)
    record = grant(ledger)
    group = make_group(record, [0])
    assert ledger.refuse(group, "logprobs_not_finite", 0.0) == ("refused", "logprobs_not_finite", None)
    books = ledger.books()
    assert books["groups"]["dropped"]["failed"] == 1 and books["refused"] == {"logprobs_not_finite": 1} and books["balanced"]
    assert verdict(ledger, group) == ("refused", "failed")


def test_an_expired_lease_is_leased_again_ahead_of_new_prompts_under_its_own_id():
    ledger, prompts = started(lease_timeout_s=10.0), counter()
    first, second = grant(ledger, prompts), grant(ledger, prompts, now=5.0)
    assert ledger.expire(9.9) == []
    was = ledger.expire(10.0)
    assert [(r.group_id, r.attempt, r.rollout_id, r.state) for r in was] == [(0, (1, 0), ROLLOUT, State.LEASED)]
    assert first.state is State.WAITING and second.state is State.LEASED
    again = grant(ledger, prompts, now=11.0)
    assert again is first and again.attempt == (1, 1) and again.deadline_s == 21.0
    assert grant(ledger, prompts).group_id == 2
    assert ledger.books()["attempts"] == {"issued": 4, "expired": 1} and ledger.books()["balanced"]


def test_a_deadline_may_be_shorter_than_the_limit_and_never_longer():
    ledger, prompts = started(lease_timeout_s=10.0), counter()
    short = ledger.grant(ROLLOUT, prompts, 1.0, timeout_s=2.0)
    long = ledger.grant(ROLLOUT, prompts, 1.0, timeout_s=99.0)
    assert short is not None and long is not None and (short.deadline_s, long.deadline_s) == (3.0, 11.0)


def test_a_group_whose_attempts_all_came_to_nothing_is_dropped_as_failed_and_replaced():
    ledger, prompts = started(max_attempts=3, max_staleness=0, groups_per_step=1), counter()
    grant(ledger, prompts)
    ledger.leave(ROLLOUT, 1.0)
    ledger.committed(ROLLOUT, 0)
    record = grant(ledger, prompts)
    ledger.expire(100.0)
    assert grant(ledger, prompts, now=200.0) is record and record.attempt == (1, 2)
    assert [r.group_id for r in ledger.expire(300.0)] == [0]
    assert ledger.books()["groups"]["dropped"]["failed"] == 1 and ledger.outstanding == 0
    assert grant(ledger, prompts).group_id == 1


def test_a_dead_rollouts_leases_go_to_the_others():
    ledger, prompts = started(), counter()
    ledger.committed("other", 0)
    mine, theirs = grant(ledger, prompts), ledger.grant("other", prompts, 0.0)
    assert theirs is not None
    assert [r.group_id for r in ledger.leave("other", 1.0)] == [theirs.group_id]
    assert mine.state is State.LEASED and grant(ledger, prompts) is theirs


def test_an_attempt_that_expired_may_still_deliver_and_makes_the_newer_lease_pointless():
    ledger, prompts = started(), counter()
    record = grant(ledger, prompts)
    slow = make_group(record, [0])
    ledger.expire(100.0)
    ledger.committed("other", 0)
    again = ledger.grant("other", prompts, 100.0)
    assert again is record
    fresh = make_group(record, [0])
    assert ledger.accept(slow, 60, 0.0) == ("accepted", "", ("other", Attempt(1, 1)))
    assert verdict(ledger, fresh) == ("duplicate", "ready")
    attempts = ledger.books()["attempts"]
    assert (attempts["issued"], attempts["expired"], attempts["superseded"], attempts["delivered_late"]) == (2, 1, 1, 1)


def test_an_attempt_that_waits_to_be_leased_cannot_deliver_yet():
    ledger = started()
    record = grant(ledger)
    ledger.expire(100.0)
    assert verdict(ledger, make_group(record, [0], attempt=Attempt(1, 1))) == ("refused", "unknown_attempt")
    assert verdict(ledger, make_group(record, [0], attempt=Attempt(1, 0))) == ("accepted", "")


def test_a_checkpoint_keeps_ready_payloads_and_leases_the_leased_again():
    ledger, prompts = started(groups_per_step=2), counter()
    records = [grant(ledger, prompts) for _ in range(4)]
    for record in records[:3]:
        verdict(ledger, make_group(record, [0, 0]))
    ledger.expire(100.0)
    ledger.grant(ROLLOUT, prompts, 100.0)
    assert ledger.take(0)
    resumed = reload(ledger, incarnation=2)
    groups = resumed.books()["groups"]
    assert (groups["ready"], groups["waiting"], groups["taken"], groups["leased"]) == (3, 1, 0, 0)
    assert resumed.books()["balanced"] and resumed.books()["attempts"]["restarted"] == 1
    assert resumed.grant(ROLLOUT, prompts, 0.0) is None, "no lease before the rollout has committed in this incarnation"
    resumed.committed(ROLLOUT, 0)
    again = resumed.grant(ROLLOUT, prompts, 0.0)
    assert again is not None and again.group_id == 3 and again.attempt == (2, 0)
    assert again.prompt.prompt_id == "p3" and again.prompt.fields == {"answer": "3"}
    batch = resumed.take(0)
    assert batch is not None and [r.group_id for r in batch] == [0, 1]
    assert all(r.payload is not None and r.payload.num_tokens == 4 for r in batch)


def test_a_taken_batch_that_the_loaded_model_has_seen_is_trained():
    ledger, prompts = started(groups_per_step=1), counter()
    verdict(ledger, make_group(grant(ledger, prompts), [0]))
    assert ledger.take(0)
    resumed = reload(ledger, incarnation=2, version=1)
    assert resumed.books()["groups"]["trained"] == 1 and resumed.books()["balanced"] and resumed.version == 1


def test_an_answer_of_the_lost_timeline_is_refused_and_one_of_the_surviving_weights_counts():
    ledger, prompts = started(groups_per_step=1, max_staleness=2), counter()
    records = [grant(ledger, prompts) for _ in range(3)]
    verdict(ledger, make_group(records[0], [0]))
    ledger.take(0)
    ledger.trained([0], 1)
    ledger.committed(ROLLOUT, 1)
    resumed = reload(ledger, incarnation=2)
    resumed.committed(ROLLOUT, 1)
    assert verdict(resumed, make_group(records[1], [0, 1, 2])) == ("refused", "lost_timeline")
    assert verdict(resumed, make_group(records[1], [0, 1])) == ("accepted", "")
    assert verdict(resumed, make_group(records[2], [0, 2], [1, 2])) == ("refused", "unknown_version")
    assert verdict(resumed, make_group(records[2], [0, 1], [1, 2])) == ("accepted", "")
    batch = resumed.take(1)
    assert batch is not None and batch[0].lag == 1


def test_a_version_lost_in_an_earlier_restart_stays_lost_when_the_run_passes_it_again():
    prompts = counter()
    second = reload(started(groups_per_step=1, max_staleness=4), incarnation=2)  # version 0 survives of incarnation 1
    second.committed(ROLLOUT, 0)
    for version in range(3):
        record = grant(second, prompts)
        assert verdict(second, make_group(record, [version], 2)) == ("accepted", "")
        assert second.take(version)
        second.trained([record.group_id], version + 1)
        second.committed(ROLLOUT, version + 1)
    third = reload(second, incarnation=5)  # incarnations 3 and 4 saved nothing
    third.committed(ROLLOUT, 3)
    assert verdict(third, make_group(grant(third, prompts), [3, 3], [2, 5])) == ("accepted", "")
    assert verdict(third, make_group(grant(third, prompts), [3, 2], [5, 1])) == ("refused", "lost_timeline")


def test_a_group_granted_after_the_checkpoint_cannot_deliver_into_the_new_timeline():
    """Its id is granted again, for the same prompt, but its tokens may be older than the new lease."""
    ledger, prompts = started(groups_per_step=1, max_staleness=1), counter()
    resumed = reload(ledger, incarnation=2)
    lost = make_group(grant(ledger, prompts), [0])
    assert verdict(resumed, lost) == ("refused", "unknown_group")
    resumed.committed(ROLLOUT, 0)
    record = resumed.grant(ROLLOUT, counter(), 0.0)
    assert record is not None and record.group_id == lost.group_id
    assert verdict(resumed, lost) == ("refused", "unknown_attempt")
    assert record.state is State.LEASED


def test_a_checkpoint_of_another_version_or_life_is_refused_with_a_sentence():
    ledger = started(incarnation=3)
    state = ledger.state_dict(lambda group: [])
    with pytest.raises(LedgerError, match="of incarnation 3, this learner is 3"):
        Ledger(make_rules(), 3).load_state_dict(state, unpack_group)
    with pytest.raises(LedgerError, match="at version 0, the model at 4"):
        Ledger(make_rules(), 4, version=4).load_state_dict(state, unpack_group)


def test_resuming_under_tighter_rules_drops_what_could_never_be_taken_in_time():
    ledger, prompts = started(groups_per_step=2, max_staleness=3), counter()
    for _ in range(8):
        verdict(ledger, make_group(grant(ledger, prompts), [0]))
    tighter = reload(ledger, incarnation=2, rules=make_rules(groups_per_step=1, max_staleness=1))
    groups = tighter.books()["groups"]
    assert groups["ready"] == 2 and groups["dropped"]["stale"] == 6 and tighter.books()["balanced"]
    assert tighter.take(0)


def test_a_delivery_larger_than_its_reservation_is_counted_at_its_size():
    ledger = started()
    record = grant(ledger)
    assert ledger.reserved_bytes == 100
    ledger.accept(make_group(record, [0]), 250, 0.0)
    assert ledger.reserved_bytes == 250
    ledger.drop([record.group_id], "failed")
    assert ledger.reserved_bytes == 0
