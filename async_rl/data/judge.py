"""The verdict on a delivered group.

Owns the reasons for which a delivery is not accepted; changes nothing. Imports async_rl.data.{record,timeline}.
Invariant: an accepted group was leased in the surviving timeline for this very prompt and number of answers, and its tokens
were sampled by weights of that timeline, none older than the group's birth.
"""

from __future__ import annotations

import numpy as np

from async_rl.data.record import Record, State, Verdict
from async_rl.data.timeline import Timeline
from async_rl.types import Group


def judge(group: Group, fate: str | None, record: Record | None, timeline: Timeline, newest_version: int) -> Verdict:
    """`fate` and `record` are those of the group's id, `newest_version` the newest that this incarnation has made.

    duplicate: the group has delivered before (reason: what became of it). refused, by reason: not_for_training,
    unknown_group, dropped (it ended without a delivery), cancelled, unknown_attempt, prompt_mismatch, group_size,
    lost_timeline, unknown_version, older_than_lease.
    """
    if group.split != "train":
        return Verdict("refused", "not_for_training")
    if fate is None:
        return Verdict("refused", "unknown_group")
    if record is None:
        return Verdict("duplicate" if fate in ("trained", "filtered", "skipped") else "refused", fate)
    if record.state in (State.READY, State.TAKEN):
        return Verdict("duplicate", record.state.value)
    objection = _objection(group, record, timeline, newest_version)
    return Verdict("refused", objection) if objection else Verdict("accepted")


def _objection(group: Group, record: Record, timeline: Timeline, newest_version: int) -> str:
    first = record.first_attempt
    if group.attempt.incarnation == first.incarnation and 0 <= group.attempt.n < first.n:
        return "cancelled"
    if not record.issued(group.attempt):
        return "unknown_attempt"
    if not np.array_equal(group.prompt_ids, record.prompt.token_ids):
        return "prompt_mismatch"
    if len(group.trajectories) != record.size:
        return "group_size"
    span = timeline.span(group)
    if span.lost:
        return "lost_timeline"
    if span.unknown or span.newest > newest_version:
        return "unknown_version"
    if span.oldest is not None and span.oldest < record.born:
        return "older_than_lease"
    return ""
