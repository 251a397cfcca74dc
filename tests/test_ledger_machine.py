"""The ledger under any order of events: every rule of design.md 5 as a rule or an invariant of a state machine.

The machine plays rollouts, learner and crashes against the real class, and keeps its own small account of what must be
true. Its end (`teardown`) is the liveness check: from wherever it stopped, obedient rollouts must bring the run home.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgpack
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from async_rl.data.ledger import Ledger
from async_rl.data.record import Record, State
from async_rl.types import Attempt, Group
from tests.ledger_samples import GROUP_BYTES, make_group, make_prompt, make_rules, pack_group, unpack_group

NAMES = st.sampled_from(["r0", "r1", "r2"])


@dataclass(frozen=True)
class Out:
    """A lease as its rollout holds it: what may still be delivered for it, whatever the ledger thinks by then."""

    record: Record  # a copy, as it was when granted
    served: int  # oldest version its tokens can have


@dataclass
class Saved:
    state: bytes
    version: int
    num_prompts: int
    allowed: dict[int, set[Attempt]]
    done: dict[int, str]


class LedgerMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    delivered = Bundle("delivered")

    @initialize(
        staleness=st.integers(0, 4),
        on_stale=st.sampled_from(["wait", "wait", "wait", "cancel", "train"]),
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
        max_attempts=st.integers(1, 4),
        spare_groups=st.integers(0, 20),
    )
    def begin(self, staleness: int, on_stale: str, sizes: list[int], max_attempts: int, spare_groups: int) -> None:
        self.sizes = sizes
        self.rules_ = make_rules(
            max_staleness=staleness,
            on_stale=on_stale,
            num_steps=len(sizes),
            groups_per_step=lambda k: sizes[k],
            max_attempts=max_attempts,
            max_buffered_bytes=(sum(sizes[: staleness + 1]) + max(sizes) + spare_groups) * GROUP_BYTES,
        )
        self.ledger = Ledger(self.rules_, 1)
        self.now = 0.0
        self.num_prompts = 0
        self.live: dict[str, int] = {}
        self.excused: set[str] = set()
        self.newest_of = {1: 0}  # incarnation -> newest version it ever made
        self.shared = {1: 0}  # incarnation -> version it resumed at
        self.checkpoints: list[Saved] = []
        self.allowed: dict[int, set[Attempt]] = {}  # attempts that may deliver, in this timeline
        self.done: dict[int, str] = {}  # ended groups, and how
        self.over = False

    # Rollouts

    @rule(name=NAMES)
    @precondition(lambda self: not self.over)
    def join_or_commit(self, name: str) -> None:
        self.ledger.committed(name, self.ledger.version)
        self.live[name] = self.ledger.version
        self.excused.discard(name)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        self.live.pop(name, None)
        self.excused.discard(name)
        self.revoked(self.ledger.leave(name, self.now), "failed")

    @rule(name=NAMES)
    def excuse(self, name: str) -> None:
        self.ledger.excuse(name)
        if name in self.live:
            self.excused.add(name)

    @rule(target=leases, name=NAMES, count=st.integers(1, 6))
    def grant(self, name: str, count: int) -> Any:
        out = []
        for _ in range(count):
            before = self.num_prompts
            record = self.ledger.grant(name, self.next_prompt, self.now)
            if record is None:
                assert self.num_prompts == before
                break
            released = self.ledger.released
            assert released is not None and name in self.live and name not in self.excused and self.live[name] >= released
            assert record.prompt.prompt_id == f"p{record.group_id}" and record.state is State.LEASED
            assert record.born <= released
            self.allowed.setdefault(record.group_id, set()).add(record.attempt)
            out.append(Out(dataclasses.replace(record), released))
        return multiple(*out)

    @rule(target=delivered, lease=consumes(leases), data=st.data())
    def deliver(self, lease: Out, data: st.DataObject) -> Any:
        """Tokens from the version served at the lease up to any that its life, or the next, has made."""
        life = lease.record.attempt.incarnation
        spread = data.draw(st.lists(st.integers(lease.served, max(lease.served, self.newest_of[life])), max_size=3))
        lives = [life] * len(spread)
        if self.ledger.incarnation > life and data.draw(st.booleans()):
            now = self.ledger.incarnation
            spread.append(data.draw(st.integers(self.shared[now], max(self.shared[now], self.ledger.version))))
            lives.append(now)
        group = make_group(lease.record, spread, lives)
        self.check_delivery(group)
        return group

    @rule(group=delivered)
    def deliver_again(self, group: Group) -> None:
        self.check_delivery(group)

    @rule(group=delivered, jump=st.integers(1, 3))
    def deliver_nonsense(self, group: Group, jump: int) -> None:
        unknown = dataclasses.replace(group, group_id=self.num_prompts + jump)
        assert self.ledger.accept(unknown, 50, self.now) == ("refused", "unknown_group", None)
        n = max((a.n for a in self.allowed.get(group.group_id, ())), default=0) + jump
        never = dataclasses.replace(group, attempt=Attempt(self.ledger.incarnation, n))
        assert self.ledger.accept(never, 50, self.now).outcome != "accepted"

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.revoked(self.ledger.expire(self.now), "failed")

    # The learner

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def take(self, data: st.DataObject) -> None:
        version = self.ledger.version
        self.revoked_as_stale(version)
        why = self.ledger.why_not(version, self.now)
        batch = self.ledger.take(version)
        assert (batch is None) == bool(why)
        if batch is None:
            return
        assert len(batch) == self.sizes[version]
        for record in batch:
            assert record.payload is not None and record.group_id not in self.done
            versions = [v for t in record.payload.trajectories for v in t.versions.tolist()]
            assert record.lag == (version - min(versions) if versions else version - record.born)
            if self.rules_.on_stale != "train":
                assert record.lag <= self.rules_.max_staleness
        ending = data.draw(st.sampled_from(["train", "train", "train", "skip", "drop one", "leave it"]))
        if ending != "leave it":
            self.settle([r.group_id for r in batch], ending)

    @rule()
    @precondition(lambda self: not self.over and bool(self.in_state(State.TAKEN)))
    def train_late(self) -> None:
        self.settle([r.group_id for r in self.in_state(State.TAKEN)], "train")

    @rule(data=st.data())
    @precondition(lambda self: self.ledger.may_filter() if self.running else False)
    def filter(self, data: st.DataObject) -> None:
        ready = self.in_state(State.READY)
        if ready:
            self.drop([data.draw(st.sampled_from(ready)).group_id], "filtered")

    @rule(data=st.data())
    def fail_one(self, data: st.DataObject) -> None:
        records = list(self.ledger._shelves.untaken())
        if records:
            self.drop([data.draw(st.sampled_from(records)).group_id], "failed")

    # Lives

    @rule()
    @precondition(lambda self: not self.over)
    def checkpoint(self) -> None:
        state = msgpack.packb(self.ledger.state_dict(pack_group))
        allowed = {g: set(attempts) for g, attempts in self.allowed.items()}
        self.checkpoints.append(Saved(state, self.ledger.version, self.num_prompts, allowed, dict(self.done)))

    @rule(back=st.integers(0, 2))
    @precondition(lambda self: len(self.newest_of) < 6 and not self.over)
    def crash(self, back: int) -> None:
        del self.checkpoints[max(0, len(self.checkpoints) - back) :]
        incarnation = self.ledger.incarnation + 1
        saved = self.checkpoints[-1] if self.checkpoints else None
        self.ledger = Ledger(self.rules_, incarnation, saved.version if saved else 0)
        self.live, self.excused, self.allowed, self.done, self.num_prompts = {}, set(), {}, {}, 0
        if saved:
            self.ledger.load_state_dict(msgpack.unpackb(saved.state), unpack_group)
            self.num_prompts, self.done = saved.num_prompts, dict(saved.done)
            self.allowed = {g: set(attempts) for g, attempts in saved.allowed.items()}
        self.newest_of[incarnation] = self.shared[incarnation] = self.ledger.version

    @rule()
    @precondition(lambda self: self.num_prompts > 6)
    def end(self) -> None:
        if not self.over:
            self.finish()

    # What must hold

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "ledger"):
            return
        books = self.ledger.books()
        assert books["balanced"], books
        groups = books["groups"]
        assert groups["granted"] == self.num_prompts
        assert groups["trained"] + sum(groups["dropped"].values()) == len(self.done)
        for how in set(self.done.values()) - {"trained"}:
            assert groups["dropped"][how] == list(self.done.values()).count(how)

    @invariant()
    def the_window_and_the_budget_hold(self) -> None:
        if not hasattr(self, "ledger"):
            return
        ledger, released = self.ledger, self.ledger.released
        assert ledger.reserved_bytes <= self.rules_.max_buffered_bytes
        if released is not None:
            assert ledger.outstanding <= self.rules_.window(released, released + self.rules_.max_staleness)

    @invariant()
    def what_is_out_can_be_taken_in_time(self) -> None:
        """Counted straight from the rule of design.md 5.3, for the step after the one that is taken or due."""
        if not hasattr(self, "ledger") or self.rules_.on_stale != "wait":
            return
        v = self.ledger.version - (0 if self.in_state(State.TAKEN) else 1)
        births = [r.born for r in self.ledger._shelves.untaken()]
        for k in range(self.rules_.max_staleness + 1):
            old = sum(1 for born in births if born <= v - self.rules_.max_staleness + k)
            assert old <= self.rules_.window(v + 1, v + k), f"{old} untaken groups are too old for the steps {v + 1}..{v + k}"

    @invariant()
    def payloads_are_where_they_belong(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for record in self.ledger._shelves.records.values():
            assert (record.payload is not None) == (record.state in (State.READY, State.TAKEN))
            assert record.group_id not in self.done
            assert record.state is not State.READY or record.oldest_version >= record.born

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            if not self.over:
                self.bring_it_home()
                self.finish()
            assert len(self.done) == self.num_prompts, "every prompt ends exactly once"

    # The machine's own account

    @property
    def running(self) -> bool:
        return not self.over and not self.in_state(State.TAKEN) and self.ledger.version < len(self.sizes)

    def in_state(self, state: State) -> list[Record]:
        return list(self.ledger._shelves.of(state).values())

    def next_prompt(self):
        self.num_prompts += 1
        return make_prompt(self.num_prompts - 1)

    def ends(self, group_id: int, how: str) -> None:
        assert self.done.setdefault(group_id, how) == how and group_id < self.num_prompts
        self.allowed.pop(group_id, None)

    def drop(self, group_ids: list[int], reason: Any) -> None:
        self.ledger.drop(group_ids, reason)
        for group_id in group_ids:
            assert group_id not in self.done
            self.ends(group_id, reason)

    def revoked(self, records: list[Record], reason: str) -> None:
        for record in records:
            if self.ledger._books.fate(record.group_id) != "live":
                assert record.num_tries + 1 == self.rules_.max_attempts
                self.ends(record.group_id, reason)

    def revoked_as_stale(self, version: int) -> None:
        before = {r.group_id: r for r in self.ledger._shelves.untaken() if self.ledger._too_old(r, version)}
        self.ledger.cancel_stale(version)
        for group_id, record in before.items() if self.rules_.on_stale == "cancel" else ():
            if self.ledger._books.fate(group_id) == "stale":
                self.ends(group_id, "stale")
            else:
                assert record.reborn
                self.allowed[group_id] = set()

    def settle(self, ids: list[int], how: str) -> None:
        if how == "skip":
            self.drop(ids, "skipped")
            return
        if how == "drop one" and len(ids) > 1:
            self.drop([ids.pop()], "failed")
        self.ledger.trained(ids, self.ledger.version + 1)
        self.newest_of[self.ledger.incarnation] = self.ledger.version
        for group_id in ids:
            self.ends(group_id, "trained")

    def check_delivery(self, group: Group) -> None:
        record = self.ledger._shelves.records.get(group.group_id)
        tries, held = (record.num_tries, record.payload is not None) if record else (0, False)
        runs = record is not None and record.state is State.LEASED and record.attempt == group.attempt
        good = record is not None and not held and self.deliverable(group)
        verdict = self.ledger.accept(group, 50, self.now)
        assert (verdict.outcome == "accepted") == good, (verdict, good, group)
        assert held == (verdict.outcome == "duplicate") or record is None
        if verdict.outcome == "refused" and runs and record is not None:
            assert record.num_tries == tries + 1
            if record.num_tries == self.rules_.max_attempts:
                self.ends(group.group_id, "failed")

    def deliverable(self, group: Group) -> bool:
        """From first principles: this timeline knows the attempt, and every token's weights are part of it."""
        names = {(i, v) for t in group.trajectories for i, v in zip(t.incarnations.tolist(), t.versions.tolist(), strict=True)}
        known = group.attempt in self.allowed.get(group.group_id, ())
        later = {i: [self.shared[j] for j in self.shared if j > i] for i, _ in names}
        return known and all(v <= min(later[i], default=v) for i, v in names)

    def bring_it_home(self) -> None:
        """Two obedient rollouts and a learner: every step must come about, in a bounded number of rounds."""
        for name in list(self.live):
            self.leave(name)
        if self.in_state(State.TAKEN):
            self.train_late()
        for _ in range(4 * len(self.sizes) + 4):
            if self.ledger.version == len(self.sizes):
                return
            for name in ("a", "b"):
                self.ledger.committed(name, self.ledger.version)
            self.deliver_everything()
            version = self.ledger.version
            self.revoked_as_stale(version)
            self.deliver_everything()
            batch = self.ledger.take(version)
            assert batch is not None, f"deadlock: {self.ledger.why_not(version, self.now)}"
            self.settle([r.group_id for r in batch], "train")
        raise AssertionError("the run does not end")

    def deliver_everything(self) -> None:
        names = ("a", "b")
        while records := [r for name in names if (r := self.ledger.grant(name, self.next_prompt, self.now))]:
            for record in records:
                self.allowed.setdefault(record.group_id, set()).add(record.attempt)
        for record in self.in_state(State.LEASED):
            name = self.ledger.incarnation
            verdict = self.ledger.accept(make_group(record, [self.ledger.version], name), 50, self.now)
            assert verdict.outcome == "accepted", verdict

    def finish(self) -> None:
        self.over = True
        for record in list(self.ledger._shelves.records.values()):
            self.ends(record.group_id, "ended")
        self.ledger.end()
        groups = self.ledger.books()["groups"]
        assert groups["waiting"] == groups["leased"] == groups["ready"] == groups["taken"] == 0
        assert self.ledger.books()["balanced"]


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
