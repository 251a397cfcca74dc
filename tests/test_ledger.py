"""The ledger's rules one by one: admission, taking, drops, refill, the books."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.data.ledger import Ledger
from async_rl.data.record import LedgerError, Record, State
from tests.ledger_samples import GROUP_BYTES, counter, make_group, make_prompt, make_rules, make_trajectory

ROLLOUT = "rollout-0#1"


def started(version: int = 0, **changes) -> Ledger:
    ledger = Ledger(make_rules(**changes), 1, version)
    ledger.committed(ROLLOUT, version)
    return ledger


def fill(ledger: Ledger, prompts, now: float = 0.0, rollout: str = ROLLOUT) -> list[Record]:
    granted = []
    while (record := ledger.grant(rollout, prompts, now)) is not None:
        granted.append(record)
    return granted


def deliver(ledger: Ledger, *records: Record, version: int | None = None) -> None:
    for record in records:
        verdict = ledger.accept(make_group(record, [record.born if version is None else version]), 60, 0.0)
        assert verdict.outcome == "accepted", verdict


def step(ledger: Ledger) -> list[Record]:
    batch = ledger.take(ledger.version)
    assert batch is not None, ledger.why_not(ledger.version, 0.0)
    ledger.trained([r.group_id for r in batch], ledger.version + 1)
    return batch


def test_no_rollout_gets_a_lease_before_its_first_commit():
    ledger = Ledger(make_rules(), 1)
    assert ledger.grant(ROLLOUT, counter(), 0.0) is None
    ledger.committed(ROLLOUT, 0)
    assert ledger.grant(ROLLOUT, counter(), 0.0) is not None


def test_the_window_is_the_sum_over_the_schedule():
    sizes = [2, 3, 4, 1, 1]
    ledger = started(max_staleness=2, groups_per_step=lambda k: sizes[k], num_steps=5)
    records = fill(ledger, counter())
    assert len(records) == 2 + 3 + 4
    deliver(ledger, *records)
    step(ledger)
    assert ledger.outstanding == 9 and not fill(ledger, counter()), "slots stay taken until the update is committed"
    ledger.committed(ROLLOUT, 1)
    assert ledger.outstanding == 7
    assert len(fill(ledger, counter())) == 1  # 3 + 4 + 1 in the window


def test_staleness_zero_is_exactly_synchronous():
    ledger, prompts = started(max_staleness=0, num_steps=3), counter()
    for version in range(3):
        records = fill(ledger, prompts)
        assert len(records) == 2
        deliver(ledger, *records, version=version)
        batch = step(ledger)
        assert [r.lag for r in batch] == [0, 0]
        assert not fill(ledger, prompts), "nothing may start before the update is committed"
        ledger.committed(ROLLOUT, version + 1)
    assert not fill(ledger, prompts)
    assert ledger.end() == []
    assert ledger.books()["groups"]["granted"] == 6


def test_grants_stop_at_what_the_remaining_steps_can_train():
    ledger, prompts = started(max_staleness=4, num_steps=3), counter()
    records = fill(ledger, prompts)
    assert len(records) == 6
    deliver(ledger, *records)
    step(ledger)
    ledger.committed(ROLLOUT, 1)
    assert not fill(ledger, prompts)
    ledger.drop([records[5].group_id], "failed")
    assert len(fill(ledger, prompts)) == 1, "a failed group is replaced, so that no step is short"


def test_the_slowest_rollout_holds_back_the_release():
    ledger, prompts = started(max_staleness=0), counter()
    ledger.committed("slow", 0)
    deliver(ledger, *fill(ledger, prompts))
    step(ledger)
    ledger.committed(ROLLOUT, 1)
    assert ledger.released == 0 and not fill(ledger, prompts)
    assert "version 1 not committed by slow" in ledger.why_not(1, 0.0)
    ledger.leave("slow", 0.0)
    assert ledger.released == 1 and len(fill(ledger, prompts)) == 2


def test_a_rollout_behind_the_release_gets_no_lease():
    ledger, prompts = started(), counter()
    deliver(ledger, *fill(ledger, prompts))
    step(ledger)
    ledger.committed(ROLLOUT, 1)
    ledger.committed("late", 0)
    assert ledger.released == 1
    assert ledger.grant("late", prompts, 0.0) is None
    ledger.committed("late", 1)
    assert ledger.grant("late", prompts, 0.0) is not None


def test_an_excused_rollout_holds_back_nothing_and_gets_no_lease():
    ledger, prompts = started(), counter()
    ledger.committed("busy", 0)
    deliver(ledger, *fill(ledger, prompts))
    step(ledger)
    ledger.excuse("busy")
    ledger.committed(ROLLOUT, 1)
    assert ledger.released == 1
    assert ledger.grant("busy", prompts, 0.0) is None
    ledger.committed("busy", 1)
    assert ledger.grant("busy", prompts, 0.0) is not None


def test_the_byte_budget_limits_grants_and_counts_what_is_held():
    ledger, prompts = started(groups_per_step=4, max_buffered_bytes=5 * GROUP_BYTES), counter()
    records = fill(ledger, prompts)
    assert len(records) == 5
    deliver(ledger, *records)  # 60 bytes each instead of the 100 reserved
    assert ledger.reserved_bytes == 300
    assert len(fill(ledger, prompts)) == 2
    assert "byte budget full" not in ledger.why_not(0, 0.0)
    step(ledger)
    assert ledger.reserved_bytes == 60 + 200


def test_a_batch_is_the_oldest_ready_groups():
    ledger, prompts = started(max_staleness=2), counter()
    records = fill(ledger, prompts)
    deliver(ledger, records[5], records[0], records[3], records[4])
    assert [r.group_id for r in step(ledger)] == [0, 3]


def test_take_waits_for_a_group_that_would_become_too_old():
    ledger, prompts = started(max_staleness=1, num_steps=9), counter()
    records = fill(ledger, prompts)
    deliver(ledger, *records[1:])
    step(ledger)  # 1, 2: groups 0 and 3 may still go into the next step
    ledger.committed(ROLLOUT, 1)
    young = fill(ledger, prompts)
    deliver(ledger, *young)
    assert ledger.take(1) is None, "3 and a young one are ready, but 0 would have lag 2 at the next step"
    assert "older ones must come first (group 0, born at version 0)" in ledger.why_not(1, 0.0)
    deliver(ledger, records[0])
    assert [r.group_id for r in step(ledger)] == [0, 3]


def test_take_looks_further_ahead_than_one_step():
    """S = 3: with one group per step, three old ones that are out already fill the three steps they may still go into."""
    ledger, prompts = started(max_staleness=3, groups_per_step=1, num_steps=20), counter()
    old = fill(ledger, prompts)
    assert len(old) == 4
    deliver(ledger, old[3])
    step(ledger)
    ledger.committed(ROLLOUT, 1)
    deliver(ledger, *fill(ledger, prompts))
    assert ledger.take(1) is None, "three groups born at 0 for the steps at 1, 2 and 3: no place for a young one"
    deliver(ledger, old[1])
    assert [r.group_id for r in step(ledger)] == [1]


def two_steps_without_the_oldest(on_stale: str) -> tuple[Ledger, Record]:
    """S = 1, one group a step: at version 2 a group born at 0 is still out."""
    ledger, prompts = started(max_staleness=1, on_stale=on_stale, groups_per_step=1, max_attempts=2), counter()
    oldest, other = fill(ledger, prompts)
    deliver(ledger, other)
    step(ledger)
    ledger.committed(ROLLOUT, 1)
    deliver(ledger, *fill(ledger, prompts))
    step(ledger)
    ledger.committed(ROLLOUT, 2)
    return ledger, oldest


def test_on_stale_train_takes_what_is_late_and_reports_its_lag():
    ledger, oldest = two_steps_without_the_oldest("train")
    deliver(ledger, oldest)
    assert [r.lag for r in step(ledger)] == [2]


def test_on_stale_cancel_samples_anew_and_counts_the_waste_by_length():
    ledger, oldest = two_steps_without_the_oldest("cancel")
    late = make_group(oldest, [0] * 5)
    leased = ledger.cancel_stale(2)
    assert [(r.group_id, r.attempt.n, r.rollout_id) for r in leased] == [(oldest.group_id, 0, ROLLOUT)]
    assert ledger.accept(late, 60, 0.0) == ("refused", "cancelled", None)
    again = ledger.grant(ROLLOUT, counter(), 0.0)
    assert again is not None and (again.group_id, again.attempt.n, again.born) == (oldest.group_id, 1, 2)
    deliver(ledger, again)
    assert step(ledger)[0].lag == 0
    books = ledger.books()
    assert books["wasted_tokens"] == {"<=8": 10} and books["attempts"]["cancelled"] == 1 and books["balanced"]


def test_a_cancelled_ready_group_is_thrown_away_once_and_sampled_again():
    ledger, oldest = two_steps_without_the_oldest("cancel")
    deliver(ledger, oldest)
    assert ledger.take(2) is None, "only on_stale=train may exceed the bound"
    assert ledger.cancel_stale(2) == [] and oldest.state is State.WAITING and oldest.payload is None
    books = ledger.books()
    assert books["tokens"]["dropped"]["stale"] == 2 and books["groups"]["dropped"]["stale"] == 0 and books["balanced"]
    assert ledger.cancel_stale(2) == [] and oldest.attempt.n == 1, "a group to be born again is not cancelled again"


def test_a_group_cancelled_too_often_is_dropped_as_stale():
    ledger, oldest = two_steps_without_the_oldest("cancel")
    oldest.num_tries = 1
    assert [r.group_id for r in ledger.cancel_stale(2)] == [oldest.group_id]
    assert ledger.books()["groups"]["dropped"]["stale"] == 1 and ledger.books()["balanced"]


def test_a_skipped_step_frees_its_slots_and_its_place_in_the_schedule():
    ledger, prompts = started(max_staleness=0), counter()
    deliver(ledger, *fill(ledger, prompts))
    batch = ledger.take(0)
    assert batch is not None and not fill(ledger, prompts)
    ledger.drop([r.group_id for r in batch], "skipped")
    assert ledger.outstanding == 0
    deliver(ledger, *fill(ledger, prompts))
    assert len(step(ledger)) == 2 and ledger.version == 1


def test_a_group_dropped_out_of_a_taken_batch_leaves_no_place_beyond_the_bound():
    ledger, prompts = started(max_staleness=0), counter()
    deliver(ledger, *fill(ledger, prompts))
    batch = ledger.take(0)
    assert batch is not None
    ledger.drop([batch[0].group_id], "filtered")
    assert not fill(ledger, prompts), "a group born at 0 could only be trained at version 1, with lag 1"
    ledger.trained([batch[1].group_id], 1)
    ledger.committed(ROLLOUT, 1)
    assert ledger.outstanding == 0 and len(fill(ledger, prompts)) == 2


def test_filtering_frees_the_slot_at_once_and_is_bounded_per_step():
    ledger, prompts = started(max_staleness=0, max_refill=2), counter()
    for _ in range(2):
        records = fill(ledger, prompts)
        deliver(ledger, *records)
        assert len(records) == 2 and ledger.may_filter()
        ledger.drop([r.group_id for r in records], "filtered")
    assert not ledger.may_filter() and "4 filtered since the last step (algorithm.max_refill" in ledger.why_not(0, 0.0)
    deliver(ledger, *fill(ledger, prompts))
    step(ledger)
    assert ledger.may_filter(), "the bound is per step"
    assert ledger.books()["groups"]["dropped"]["filtered"] == 4


def test_lag_is_taken_from_the_oldest_sampled_token():
    ledger, prompts = started(max_staleness=2, groups_per_step=1), counter()
    records = fill(ledger, prompts)
    deliver(ledger, records[1])
    step(ledger)
    observed = make_trajectory([0, 1], mask=[False, True])
    assert ledger.accept(make_group(records[0], [], trajectories=(observed, observed)), 60, 0.0).outcome == "accepted"
    assert step(ledger)[0].lag == 0, "a token that nobody sampled has no age"
    mixed = make_group(records[2], [], trajectories=(make_trajectory([2, 2]), make_trajectory([0, 1, 2])))
    assert ledger.accept(mixed, 60, 0.0).outcome == "accepted"
    assert step(ledger)[0].lag == 2


def test_why_not_names_numbers_ages_and_holders():
    ledger, prompts = started(groups_per_step=3), counter()
    records = fill(ledger, prompts, now=5.0)
    deliver(ledger, *records[:2])
    assert ledger.why_not(0, 8.5) == "2/3 ready, 4 leased (oldest group 2 for 3.5 s at rollout-0#1), 0 waiting"
    oldest = ledger.oldest_lease(8.5)
    assert oldest is not None and oldest[0].group_id == 2 and oldest[1] == 3.5
    deliver(ledger, records[2])
    assert ledger.why_not(0, 9.0) == ""
    ledger.leave(ROLLOUT, 9.0)
    assert ledger.why_not(0, 9.0) == "" and ledger.oldest_lease(9.0) is None
    step(ledger)
    assert "0/3 ready, 0 leased, 3 waiting, no rollout is live" in ledger.why_not(1, 9.0)


def test_the_end_drops_everything_that_is_out():
    ledger, prompts = started(), counter()
    records = fill(ledger, prompts)
    deliver(ledger, *records[:3])
    ledger.take(0)
    leased = ledger.end()
    assert [(r.group_id, r.state, r.rollout_id) for r in leased] == [(3, State.LEASED, ROLLOUT)]
    books = ledger.books()
    assert books["groups"]["dropped"]["ended"] == 4 and books["balanced"]
    assert all(books["groups"][state] == 0 for state in ("waiting", "leased", "ready", "taken"))
    assert ledger.accept(make_group(records[3], [0]), 60, 0.0) == ("refused", "ended", None)
    assert ledger.grant(ROLLOUT, prompts, 0.0) is None and ledger.outstanding == 0
    assert ledger.books()["tokens"]["refused"] == 2 and ledger.books()["balanced"]


def test_a_prompt_stream_that_raises_changes_nothing():
    ledger = started()

    def broken(step):
        raise OSError("no more prompts")

    with pytest.raises(OSError, match="no more prompts"):
        ledger.grant(ROLLOUT, broken, 0.0)
    assert ledger.outstanding == 0 and ledger.books()["groups"]["granted"] == 0 and ledger.books()["balanced"]
    assert fill(ledger, lambda step: (make_prompt(1), 2))[0].group_id == 0


def test_a_caller_that_breaks_the_protocol_is_told_so():
    ledger, prompts = started(num_steps=1), counter()
    with pytest.raises(LedgerError, match="at version 0, its caller at 1"):
        ledger.take(1)
    records = fill(ledger, prompts)
    deliver(ledger, *records)
    assert ledger.take(0)
    with pytest.raises(LedgerError, match="neither trained nor skipped"):
        ledger.take(0)
    with pytest.raises(LedgerError, match=r"the taken batch is \[0, 1\], not \[0\]"):
        ledger.trained([0], 1)
    ledger.trained([0, 1], 1)
    with pytest.raises(LedgerError, match="only 1 steps"):
        ledger.take(1)
    with pytest.raises(LedgerError, match="group 0 is not in the ledger: it is trained"):
        ledger.drop([0], "failed")


def test_the_data_floor_needs_numpy_only():
    import subprocess
    import sys

    code = "import sys, async_rl.data.ledger, async_rl.data.prompts, async_rl.data.evaluation; print(sorted(sys.modules))"
    root = Path(__file__).parent.parent
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root, timeout=60).stdout
    assert not any(f"'{name}'" in out for name in ("torch", "vllm", "transformers", "zmq", "pydantic"))
