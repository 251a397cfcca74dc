"""The ledger: what may be sampled, what has arrived, what may be trained, and where everything went (design.md 5).

WAITING -> LEASED -> READY -> TAKEN -> TRAINED, or DROPPED{filtered, failed, stale, skipped, ended}. Pure: time and events
are arguments; no clock, no I/O; calls from one thread at a time. Imports the other nouns of async_rl.data only.

Invariants: every granted group is in one state or has met one fate, and the token books add up (`books()["balanced"]`).
With on_stale "wait", what is untaken can always still be taken in time (`lookahead.overdue` is empty): `grant` keeps it so
by the window, `take` by looking ahead; every other event only removes untaken groups. So lag <= S, and no wait is in vain.

Steps are never short: a group dropped before it is taken frees its slot, and the prompt stream has no end, so another
comes. Filter READY groups, before `take`: one dropped out of a taken batch is not replaced, because its step has gone by
and the later ones have no place for more within the bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from async_rl.data.books import Books
from async_rl.data.judge import judge
from async_rl.data.lookahead import overdue
from async_rl.data.quorum import Quorum
from async_rl.data.record import (
    Deal,
    Decode,
    DropReason,
    Encode,
    LedgerError,
    Record,
    Rules,
    State,
    Verdict,
    pack_record,
    unpack_record,
)
from async_rl.data.shelves import Shelves
from async_rl.data.timeline import Timeline
from async_rl.types import Attempt, Group

WAITING, LEASED, READY, TAKEN = State.WAITING, State.LEASED, State.READY, State.TAKEN


class Ledger:
    """One run's groups, seen by one incarnation of the learner that started (or resumed) at `version`."""

    def __init__(self, rules: Rules, incarnation: int, version: int = 0) -> None:
        self.rules = rules
        self.incarnation = incarnation
        self.version = version  # the learner's, moved by `trained`
        self.ended = False
        self._quorum = Quorum()
        self._timeline = Timeline(incarnation, version)
        self._books = Books()
        self._shelves = Shelves()
        self._unreleased: dict[int, int] = {}  # version made -> groups trained into it
        self._num_filtered = 0  # since the last take

    # Who serves what

    def committed(self, rollout_id: str, version: int) -> None:
        """The rollout now serves this incarnation's `version`. The first commit makes it live; any ends its excuse."""
        self._quorum.commit(rollout_id, version)
        self._free_slots()

    def excuse(self, rollout_id: str) -> None:
        """An evaluation defers this rollout's commits: nobody waits for it, and it gets no lease until `committed`."""
        self._quorum.excuse(rollout_id)
        self._free_slots()

    def leave(self, rollout_id: str, now: float) -> list[Record]:
        """The rollout is gone: its leases wait for another, or fail. Returns them as they were. `now` in seconds."""
        self._quorum.leave(rollout_id)
        self._free_slots()
        held = [r for r in self._shelves.of(LEASED).values() if r.rollout_id == rollout_id]
        return [self._end_attempt(record, "left") for record in held]

    @property
    def released(self) -> int | None:
        """The newest version that every live rollout has committed, at which leases are born; None before the first."""
        return self._quorum.released

    # Grants

    def grant(self, rollout_id: str, deal: Deal, now: float, timeout_s: float | None = None) -> Record | None:
        """Lease a group to this rollout: one that waits, else a new one from `deal` if the window and the byte budget have
        room. None: not now. The deadline is `timeout_s` from now, at most `lease_timeout_s`."""
        born = self._quorum.released
        if self.ended or born is None or not self._quorum.may_lease(rollout_id):
            return None
        record = self._shelves.oldest(WAITING) or self._new_group(deal, born)
        if record is None:
            return None
        if record.reborn:
            record.born = born
        limit = self.rules.lease_timeout_s
        record.rollout_id, record.leased_s = rollout_id, now
        record.deadline_s = now + (limit if timeout_s is None else min(timeout_s, limit))
        self._shelves.move(record, LEASED)
        self._books.attempts["issued"] += 1
        return record

    @property
    def outstanding(self) -> int:
        """Slots in use: untaken groups, and taken ones until the rollouts have committed the version they made."""
        return len(self._shelves.records) + sum(self._unreleased.values())

    @property
    def room(self) -> int:
        """New groups that the window and the byte budget allow now. What the steps since a = `released` took is left out
        on both sides of design.md's `outstanding < sum of G(a..a+S)`, which makes it exact after a short step, too."""
        if self._quorum.released is None or self.ended:
            return 0
        last = self._quorum.released + self.rules.max_staleness
        slots = self.rules.window(self._next_step, last) - self._shelves.count(WAITING, LEASED, READY)
        return max(0, min(slots, (self.rules.max_buffered_bytes - self.reserved_bytes) // self.rules.max_group_bytes))

    @property
    def reserved_bytes(self) -> int:
        """Payloads held, and the most that the groups still to come can take."""
        return self._shelves.held_bytes + self._shelves.count(WAITING, LEASED) * self.rules.max_group_bytes

    # Deliveries

    def accept(self, group: Group, num_bytes: int, now: float) -> Verdict:
        """Judge a delivered group. The first good delivery of any attempt that may still deliver is accepted, also of
        one that has expired meanwhile: its tokens are no older than the group's birth, and another try costs more."""
        verdict = self._judge(group)
        if verdict.outcome != "accepted":
            return self._reject(group, verdict)
        self._books.tokens["received"] += group.num_tokens
        record = self._shelves.records[group.group_id]
        running = self._runs(record, group)
        other = (record.rollout_id or "", record.attempt) if record.state is LEASED and not running else None
        self._books.attempts["delivered_late" if not running else "delivered"] += 1
        if other:
            self._books.attempts["superseded"] += 1
        oldest = self._timeline.span(group).oldest
        record.oldest_version = record.born if oldest is None else oldest
        record.num_bytes, record.num_tokens, record.payload = num_bytes, group.num_tokens, group
        self._shelves.move(record, READY)
        return verdict._replace(cancel=other)

    def refuse(self, group: Group, reason: str, now: float) -> Verdict:
        """Book a delivery that the caller finds unfit, for `reason`; if its lease runs, that attempt ends."""
        verdict = self._judge(group)
        return self._reject(group, Verdict("refused", reason) if verdict.outcome == "accepted" else verdict)

    # Steps

    def take(self, version: int) -> list[Record] | None:
        """The batch of the step at learner version `version`, oldest first: READY -> TAKEN. None while too few groups
        are ready, or (on_stale "wait") while others could come too late if the step went without them."""
        self._at(version)
        if self._shelves.of(TAKEN):
            raise LedgerError(f"take({version}): the batch taken before is neither trained nor skipped: settle it first")
        if version >= self.rules.num_steps:
            raise LedgerError(f"take({version}): the run has only {self.rules.num_steps} steps: end it")
        batch = self._batch(version)
        if len(batch) < self.rules.groups_per_step(version) or self._overdue_without(batch):
            return None
        for record in batch:
            record.taken_version = version
            self._shelves.move(record, TAKEN)
        self._num_filtered = 0
        return batch

    def trained(self, group_ids: Iterable[int], new_version: int) -> None:
        """The taken batch made `new_version`: TAKEN -> TRAINED. Its slots are free once the rollouts commit that."""
        ids, taken = set(group_ids), set(self._shelves.of(TAKEN))
        if ids != taken:
            raise LedgerError(f"trained: the taken batch is {sorted(taken)}, not {sorted(ids)}")
        self._at(new_version - 1)
        for group_id in sorted(ids):
            self._close(self._shelves.records[group_id], None)
        self.version = new_version
        self._unreleased[new_version] = len(ids)
        self._free_slots()

    def drop(self, group_ids: Iterable[int], reason: DropReason) -> list[Record]:
        """End unfinished groups and free their slots at once. A step that publishes nothing drops its whole batch as
        "skipped". Returns those that were leased, as they were, for the caller to cancel."""
        records = [self._known(group_id) for group_id in dict.fromkeys(group_ids)]
        leased = [replace(r) for r in records if r.state is LEASED]
        self._books.attempts["dropped"] += len(leased)
        self._num_filtered += len(records) if reason == "filtered" else 0
        for record in records:
            self._close(record, reason)
        return leased

    def may_filter(self) -> bool:
        """False once max_refill * G groups were filtered since the last batch: train on what there is until the next."""
        return self._num_filtered < self.rules.max_refill * self.rules.groups_per_step(self.version)

    def expire(self, now: float) -> list[Record]:
        """End the attempts past their deadline; their groups wait again, or fail. Returns the leases as they were, for
        the caller to cancel."""
        late = [r for r in self._shelves.of(LEASED).values() if r.deadline_s <= now]
        return [self._end_attempt(record, "expired") for record in late]

    def cancel_stale(self, version: int) -> list[Record]:
        """on_stale "cancel": sample anew what a step at `version` would take beyond the bound; call it before `take`.
        Returns the leases among them, as they were, for the caller to cancel. Otherwise it does nothing."""
        self._at(version)
        if self.rules.on_stale != "cancel":
            return []
        stale = [r for r in self._shelves.untaken() if not r.reborn and self._too_old(r, version)]
        leased = [replace(r) for r in stale if r.state is LEASED]
        for record in stale:
            self._cancel(record)
        return leased

    def end(self) -> list[Record]:
        """The run is over: everything outstanding is dropped as "ended". Returns what was leased, as it was."""
        self.ended = True
        return self.drop(list(self._shelves.records), "ended")

    # What it says

    @property
    def unleased(self) -> list[int]:
        """Ids of the unfinished groups that no rollout is at work on."""
        return [group_id for group_id, record in self._shelves.records.items() if record.state is not LEASED]

    def oldest_lease(self, now: float) -> tuple[Record, float] | None:
        """The lease that has run longest, and for how many seconds."""
        record = min(self._shelves.of(LEASED).values(), key=lambda r: (r.leased_s, r.group_id), default=None)
        return None if record is None else (record, now - record.leased_s)

    def why_not(self, version: int, now: float) -> str:
        """What `take(version)` waits for, in one line; "" when it would succeed."""
        batch, need = self._batch(version), self.rules.groups_per_step(version)
        if len(batch) == need and not self._overdue_without(batch):
            return ""
        lease, awaited = self.oldest_lease(now), self._shelves.oldest(WAITING, LEASED)
        at = f" (oldest group {lease[0].group_id} for {lease[1]:.1f} s at {lease[0].rollout_id})" if lease else ""
        parts = [f"{self._shelves.count(READY)}/{need} ready", f"{self._shelves.count(LEASED)} leased{at}"]
        parts.append(f"{self._shelves.count(WAITING)} waiting")
        if len(batch) == need and awaited:
            parts.append(f"older ones must come first (group {awaited.group_id}, born at version {awaited.born})")
        if not self._quorum.committed:
            parts.append("no rollout is live")
        elif behind := self._quorum.behind(version):
            parts.append(f"version {version} not committed by {', '.join(behind)}")
        if self._num_filtered:
            parts.append(f"{self._num_filtered} filtered since the last step (algorithm.max_refill bounds that)")
        if self.reserved_bytes + self.rules.max_group_bytes > self.rules.max_buffered_bytes:
            parts.append(f"byte budget full ({self.reserved_bytes} of {self.rules.max_buffered_bytes} bytes)")
        return ", ".join(parts)

    def books(self) -> dict[str, Any]:
        """Where every group, token and attempt is or went, and whether that adds up ("balanced")."""
        return self._books.balance(self._shelves.records.values())

    # Checkpoints

    def state_dict(self, encode: Encode) -> dict[str, Any]:
        """Everything as msgpack-able data, payloads as the frames of `encode`. Which rollouts live is not part of it."""
        return {
            "version": self.version,
            "resumes": [list(pair) for pair in self._timeline.resumes],
            "books": self._books.state_dict(),
            "num_filtered": self._num_filtered,
            "records": [pack_record(record, encode) for record in self._shelves.records.values()],
        }

    def load_state_dict(self, state: dict[str, Any], decode: Decode, more_answers: int = 0) -> None:
        """Take up what an earlier incarnation saved, at this ledger's version c. Leased groups wait again, under attempts
        of this incarnation; READY ones stay; TAKEN ones are READY again, or trained if the model of c has seen them.
        Where a group needs `more_answers` than it was granted (fewer below 0), all that could still be taken wait for new ones.
        Under rules that became tighter, groups that no step could take in time are dropped as stale."""
        saved, last = state["version"], state["resumes"][-1][0]
        trained = any(r["state"] == TAKEN and r["taken_version"] < self.version for r in state["records"])
        if last >= self.incarnation:
            raise LedgerError(
                f"the saved ledger is of incarnation {last}, this learner is {self.incarnation}: it must be higher"
            )
        if self.version != saved + trained:
            raise LedgerError(
                f"the saved ledger is at version {saved}, the model at {self.version}: load both from one checkpoint"
            )
        self._timeline.extend(state["resumes"])
        self._books.load_state_dict(state["books"])
        self._num_filtered = state["num_filtered"]
        for data in state["records"]:
            self._restore(unpack_record(data, decode), more_answers)
        if self.rules.on_stale == "wait":
            self.drop([r.group_id for r in overdue(self.rules, self.version, self._shelves.untaken())], "stale")

    def _restore(self, record: Record, more_answers: int) -> None:
        if record.state is TAKEN and record.taken_version < self.version:
            self._shelves.add(record)
            self._close(record, None)
            return
        if record.state is TAKEN:
            record.state = READY
        if record.state is LEASED:
            self._books.attempts["restarted"] += 1
        if more_answers:
            if record.payload is not None:
                self._books.discard(record, record.payload, "filtered")
            record.empty(more_answers, self.version)
        if record.state is not READY:
            reborn = record.reborn
            record.state, record.attempt = WAITING, record.next_attempt(self.incarnation)
            record.first_attempt = record.attempt if reborn else record.first_attempt
        self._shelves.add(record)

    # Inside

    @property
    def _next_step(self) -> int:
        """The first step that has not taken its batch."""
        return self.version + (1 if self._shelves.of(TAKEN) else 0)

    def _at(self, version: int) -> None:
        if version != self.version:
            raise LedgerError(f"the ledger is at version {self.version}, its caller at {version}")

    def _known(self, group_id: int) -> Record:
        if group_id not in self._shelves.records:
            raise LedgerError(f"group {group_id} is not in the ledger: it is {self._books.fate(group_id) or 'unknown'}")
        return self._shelves.records[group_id]

    def _free_slots(self) -> None:
        released = -1 if self._quorum.released is None else self._quorum.released
        self._unreleased = {made: num for made, num in self._unreleased.items() if made > released}

    def _new_group(self, deal: Deal, born: int) -> Record | None:
        """A new group is the youngest, and steps take the oldest first: all untaken ones go before it, and so it is dealt for
        the step that they leave it to. Around a change of size some still come to another: those that arrive before an
        older one, and those behind one that is dropped."""
        if self.room < 1:
            return None
        first = Attempt(self.incarnation, 0)
        prompt, size = deal(self.rules.step_of(self._shelves.count(WAITING, LEASED, READY), self._next_step))
        record = Record(self._books.open(), prompt, first, first, born, size)
        self._shelves.add(record)
        return record

    def _judge(self, group: Group) -> Verdict:
        fate, record = self._books.fate(group.group_id), self._shelves.records.get(group.group_id)
        return judge(group, fate, record, self._timeline, max(self.version, self._quorum.newest))

    def _runs(self, record: Record, group: Group) -> bool:
        return record.state is LEASED and record.attempt == group.attempt and group.split == "train"

    def _reject(self, group: Group, verdict: Verdict) -> Verdict:
        self._books.reject(group, verdict)
        record = self._shelves.records.get(group.group_id)
        if verdict.outcome == "refused" and record and self._runs(record, group):
            self._end_attempt(record, "refused")
        return verdict

    def _batch(self, version: int) -> list[Record]:
        """The oldest G ready groups, or as many as there are."""
        ready = [r for r in self._shelves.of(READY).values() if self.rules.on_stale == "train" or not self._too_old(r, version)]
        return sorted(ready, key=lambda r: r.age_order)[: self.rules.groups_per_step(version)]

    def _overdue_without(self, batch: list[Record]) -> bool:
        if self.rules.on_stale != "wait":
            return False
        ids = {record.group_id for record in batch}
        rest = [r for r in self._shelves.untaken() if r.group_id not in ids]
        return bool(overdue(self.rules, self.version + 1, rest))

    def _too_old(self, record: Record, version: int) -> bool:
        birth = record.oldest_version if record.state is READY else record.born
        return version - birth > self.rules.max_staleness

    def _end_attempt(self, record: Record, why: str) -> Record:
        """The running attempt came to nothing. Returns the lease as it was."""
        was = replace(record)
        self._books.attempts[why] += 1
        self._try_again(record, "failed")
        return was

    def _cancel(self, record: Record) -> None:
        """Sample it anew: no attempt so far may deliver any more."""
        if record.state is LEASED:
            self._books.attempts["cancelled"] += 1
        if record.payload is not None:
            self._books.discard(record, record.payload, "stale")
        if record.state is WAITING or self._try_again(record, "stale"):
            record.first_attempt = record.attempt

    def _try_again(self, record: Record, reason: DropReason) -> bool:
        """Back to WAITING for the next attempt, unless this was the last: then it is dropped for `reason`."""
        record.num_tries += 1
        if record.num_tries >= self.rules.max_attempts:
            self._close(record, reason)
            return False
        self._shelves.move(record, WAITING)
        record.attempt = record.next_attempt(self.incarnation)
        return True

    def _close(self, record: Record, reason: DropReason | None) -> None:
        self._shelves.remove(record)
        self._books.close(record, reason)
