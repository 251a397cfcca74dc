"""Every rule of the ledger (design.md 5) as a rule or an invariant of a state machine.

The machine plays rollouts, learner and crashes against the real class, and keeps its own small account of what must be
true. Its end (`teardown`) is the liveness check: from wherever it stopped, obedient rollouts must bring the run home.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

import msgpack
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from async_rl.data.ledger import Ledger
from async_rl.data.record import Record, State
from async_rl.types import Attempt, Group, Prompt
from tests.ledger_samples import GROUP_BYTES, make_group, make_prompt, make_rules, pack_group, packed, unpack_group

NAMES = ("r0", "r1", "r2")
RNG = st.randoms(use_true_random=False)


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
    size_of: dict[int, int]
    first: dict[int, Attempt]
    done: dict[int, str]


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        staleness=st.integers(0, 4),
        on_stale=st.sampled_from(["wait", "wait", "wait", "cancel", "train"]),
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
        max_attempts=st.integers(1, 4),
        spare_groups=st.integers(0, 20),
        timeout_s=st.sampled_from([10.0, 100.0]),
    )
    def begin(
        self, staleness: int, on_stale: str, sizes: list[int], max_attempts: int, spare_groups: int, timeout_s: float
    ) -> None:
        self.sizes = sizes
        self.rules_ = make_rules(
            max_staleness=staleness,
            on_stale=on_stale,
            num_steps=len(sizes),
            groups_per_step=lambda k: sizes[k],
            max_attempts=max_attempts,
            lease_timeout_s=timeout_s,
            max_buffered_bytes=(sum(sizes[: staleness + 1]) + max(sizes) + spare_groups) * GROUP_BYTES,
        )
        self.ledger = Ledger(self.rules_, 1)
        self.now = 0.0
        self.num_prompts = 0
        self.size_of: dict[int, int] = {}  # group -> siblings, as they were dealt; of no two steps alike
        self.live: dict[str, int] = {}
        self.excused: set[str] = set()
        self.newest_of = {1: 0}  # incarnation -> newest version it ever made
        self.shared = {1: 0}  # incarnation -> version it resumed at
        self.checkpoints: list[Saved] = []
        self.leased: set[tuple[int, Attempt]] = set()  # every lease of every life
        self.first: dict[int, Attempt] = {}  # group -> the first attempt of this timeline that is not cancelled
        self.done: dict[int, str] = {}  # ended groups, and how
        self.out: list[Out] = []
        self.seen: list[Group] = []
        self.join("r0")
        self.join("r1")

    # Events

    @rule(rng=RNG)
    def commit(self, rng: random.Random) -> None:
        """All rollouts, or one of them, serve the learner's version; one that is not live joins thereby."""
        for name in rng.choice([(rng.choice(NAMES),), tuple(self.live), tuple(self.live)]):
            self.join(name)

    @rule(rng=RNG)
    def grant(self, rng: random.Random) -> None:
        name = rng.choice(NAMES)
        for _ in range(rng.choice([1, 3, 20])):
            before = self.num_prompts
            record = self.ledger.grant(name, self.deal, self.now)
            if record is None:
                assert self.num_prompts == before
                break
            released = self.ledger.released
            assert released is not None and name in self.live and name not in self.excused and self.live[name] >= released
            assert record.prompt.prompt_id == f"p{record.group_id}" and record.state is State.LEASED
            assert record.born <= released and record.size == self.size_of[record.group_id]
            self.leases(record)
            self.out.append(Out(dataclasses.replace(record), released))

    @rule(rng=RNG)
    def deliver(self, rng: random.Random) -> None:
        """Tokens from the version served at the lease up to any that its life, or the current one, has made."""
        for _ in range(min(rng.randint(1, 4), len(self.out))):
            lease = self.out.pop(rng.randrange(len(self.out)))
            if lease.record.group_id % 5 == 0 and rng.random() < 0.85:  # a long answer
                self.out.append(lease)
                continue
            life, now = lease.record.attempt.incarnation, self.ledger.incarnation
            newest = max(lease.served, self.newest_of[life])
            names = [(life, rng.randint(lease.served, newest)) for _ in range(rng.randint(0, 2))]
            if now > life and rng.random() < 0.3:
                names.append((now, rng.randint(self.shared[now], self.ledger.version)))
            group = make_group(lease.record, [v for _, v in names], [i for i, _ in names])
            if rng.random() < 0.1:
                group = dataclasses.replace(group, trajectories=group.trajectories[:-1])
            self.seen.append(group)
            self.check_delivery(group)

    @rule(rng=RNG)
    def deliver_again_or_nonsense(self, rng: random.Random) -> None:
        if not self.seen:
            return
        group, jump, now = rng.choice(self.seen), rng.randint(1, 3), self.ledger.incarnation
        self.check_delivery(group)
        unknown = dataclasses.replace(group, group_id=self.num_prompts + jump)
        assert self.ledger.accept(unknown, 50, self.now) == ("refused", "unknown_group", None)
        n = max((a.n for g, a in self.leased if g == group.group_id and a.incarnation == now), default=0) + jump
        never = dataclasses.replace(group, attempt=Attempt(now, n))
        assert self.ledger.accept(never, 50, self.now).outcome != "accepted"

    @rule(rng=RNG)
    def time_passes(self, rng: random.Random) -> None:
        self.now += rng.choice([1.0, 4.0, 8.0])
        self.revoked(self.ledger.expire(self.now), "failed")

    @rule(rng=RNG)
    def misfortune(self, rng: random.Random) -> None:
        kind, name, untaken = rng.choice(["leave", "excuse", "fail"]), rng.choice(NAMES), self.ledger._shelves.untaken()
        if kind == "leave":
            self.leave(name)
        elif kind == "excuse":
            self.ledger.excuse(name)
            self.excused |= {name} & set(self.live)
        elif untaken:
            self.drop([rng.choice(untaken).group_id], "failed")

    @rule(rng=RNG)
    def take(self, rng: random.Random) -> None:
        version = self.ledger.version
        if self.in_state(State.TAKEN) or version == len(self.sizes):
            return
        self.cancel_stale(version)
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

    @rule(rng=RNG)
    def settle(self, rng: random.Random) -> None:
        ids = [r.group_id for r in self.in_state(State.TAKEN)]
        kind = rng.choice(["train", "train", "train", "train", "skip", "drop one"])
        if ids and kind == "skip":
            self.drop(ids, "skipped")
            return
        if len(ids) > 1 and kind == "drop one":
            self.drop([ids.pop()], "failed")
        if ids:
            self.train(ids)

    @rule(rng=RNG)
    def filter(self, rng: random.Random) -> None:
        ready = self.in_state(State.READY)
        if ready and self.ledger.version < len(self.sizes) and self.ledger.may_filter():
            self.drop([rng.choice(ready).group_id], "filtered")

    @rule(rng=RNG)
    def checkpoint(self, rng: random.Random) -> None:
        state = packed(self.ledger.state_dict(pack_group))
        self.checkpoints.append(
            Saved(state, self.ledger.version, self.num_prompts, dict(self.size_of), dict(self.first), dict(self.done))
        )

    @rule(rng=RNG)
    def crash(self, rng: random.Random) -> None:
        if len(self.newest_of) > 6:
            return
        del self.checkpoints[max(0, len(self.checkpoints) - rng.choice([0, 0, 1, 2])) :]
        incarnation = self.ledger.incarnation + 1
        saved = self.checkpoints[-1] if self.checkpoints else None
        self.ledger = Ledger(self.rules_, incarnation, saved.version if saved else 0)
        self.live, self.excused, self.first, self.done, self.num_prompts, self.size_of = {}, set(), {}, {}, 0, {}
        if saved:
            self.ledger.load_state_dict(msgpack.unpackb(saved.state), unpack_group)
            self.num_prompts, self.size_of = saved.num_prompts, dict(saved.size_of)
            self.first, self.done = dict(saved.first), dict(saved.done)
        self.newest_of[incarnation] = self.shared[incarnation] = self.ledger.version
        self.join("r0")
        self.join("r1")

    # What must hold

    @invariant()
    def check(self) -> None:
        if hasattr(self, "ledger"):
            self.check_books()
            self.check_bounds()
            self.check_payloads()

    def check_books(self) -> None:
        books = self.ledger.books()
        assert books["balanced"], books
        groups = books["groups"]
        assert groups["granted"] == self.num_prompts
        ends = {"trained": groups["trained"]} | groups["dropped"]
        assert ends == {how: list(self.done.values()).count(how) for how in ends}

    def check_bounds(self) -> None:
        """The window, the byte budget, and (counted straight from design.md 5.3) that what is out can be taken in time."""
        ledger, released, staleness = self.ledger, self.ledger.released, self.rules_.max_staleness
        assert ledger.reserved_bytes <= self.rules_.max_buffered_bytes
        if released is not None:
            assert ledger.outstanding <= self.rules_.window(released, released + staleness)
        if self.rules_.on_stale == "wait":
            v = ledger.version - (0 if self.in_state(State.TAKEN) else 1)
            births = [r.born for r in ledger._shelves.untaken()]
            for k in range(staleness + 1):
                old = sum(1 for born in births if born <= v - staleness + k)
                assert old <= self.rules_.window(v + 1, v + k), f"{old} groups are too old for the steps {v + 1}..{v + k}"

    def check_payloads(self) -> None:
        for record in self.ledger._shelves.records.values():
            assert (record.payload is not None) == (record.state in (State.READY, State.TAKEN))
            assert record.group_id not in self.done
            assert record.state is not State.READY or record.oldest_version >= record.born
            assert record.size == self.size_of[record.group_id], "a size stays, over attempts and lives"
            assert record.payload is None or len(record.payload.trajectories) == record.size

    def teardown(self) -> None:
        """From wherever the machine stopped: the run comes home, and then everything has ended exactly once."""
        if not hasattr(self, "ledger"):
            return
        self.bring_it_home()
        for group_id in list(self.ledger._shelves.records):
            self.ends(group_id, "ended")
        self.ledger.end()
        self.check()
        groups = self.ledger.books()["groups"]
        assert groups["waiting"] == groups["leased"] == groups["ready"] == groups["taken"] == 0
        assert len(self.done) == self.num_prompts, "every prompt ends exactly once"

    # The machine's own account

    def in_state(self, state: State) -> list[Record]:
        return list(self.ledger._shelves.of(state).values())

    def join(self, name: str) -> None:
        self.ledger.committed(name, self.ledger.version)
        self.live[name] = self.ledger.version
        self.excused.discard(name)

    def leave(self, name: str) -> None:
        self.live.pop(name, None)
        self.excused.discard(name)
        self.revoked(self.ledger.leave(name, self.now), "failed")

    def deal(self, step: int) -> tuple[Prompt, int]:
        """Counted from first principles: the groups ahead fill the steps before, and not this one."""
        ahead, next_step = len(self.ledger._shelves.untaken()), self.ledger.version + bool(self.in_state(State.TAKEN))
        assert sum(self.sizes[next_step:step]) <= ahead < sum(self.sizes[next_step : step + 1])
        self.num_prompts += 1
        self.size_of[self.num_prompts - 1] = 1 + (step + self.num_prompts) % 3
        return make_prompt(self.num_prompts - 1), self.size_of[self.num_prompts - 1]

    def leases(self, record: Record) -> None:
        assert (record.group_id, record.attempt) not in self.leased, "an attempt is issued once, over all lives"
        self.leased.add((record.group_id, record.attempt))
        self.first.setdefault(record.group_id, record.attempt)

    def ends(self, group_id: int, how: str) -> None:
        assert self.done.setdefault(group_id, how) == how and group_id < self.num_prompts
        self.first.pop(group_id, None)

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

    def cancel_stale(self, version: int) -> None:
        before = {r.group_id: r for r in self.ledger._shelves.untaken() if self.ledger._too_old(r, version)}
        self.ledger.cancel_stale(version)
        for group_id, record in before.items() if self.rules_.on_stale == "cancel" else ():
            if self.ledger._books.fate(group_id) == "stale":
                self.ends(group_id, "stale")
            else:
                assert record.reborn
                self.first.pop(group_id, None)

    def train(self, ids: list[int]) -> None:
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
        first = self.first.get(group.group_id)
        whole = len(group.trajectories) == self.size_of.get(group.group_id)
        known = first is not None and group.attempt >= first and (group.group_id, group.attempt) in self.leased
        later = {i: [self.shared[j] for j in self.shared if j > i] for i, _ in names}
        return known and whole and all(v <= min(later[i], default=v) for i, v in names)

    def bring_it_home(self) -> None:
        """Two obedient rollouts and a learner: every step must come about, in a bounded number of rounds."""
        for name in list(self.live):
            self.leave(name)
        if taken := [r.group_id for r in self.in_state(State.TAKEN)]:
            self.train(taken)
        for _ in range(4 * len(self.sizes) + 4):
            if self.ledger.version == len(self.sizes):
                return
            for name in ("a", "b"):
                self.ledger.committed(name, self.ledger.version)
            self.deliver_everything()
            version = self.ledger.version
            self.cancel_stale(version)
            self.deliver_everything()
            batch = self.ledger.take(version)
            assert batch is not None, f"deadlock: {self.ledger.why_not(version, self.now)}"
            self.train([r.group_id for r in batch])
        raise AssertionError("the run does not end")

    def deliver_everything(self) -> None:
        names = ("a", "b")
        while records := [r for name in names if (r := self.ledger.grant(name, self.deal, self.now))]:
            for record in records:
                self.leases(record)
        for record in self.in_state(State.LEASED):
            name = self.ledger.incarnation
            verdict = self.ledger.accept(make_group(record, [self.ledger.version], name), 50, self.now)
            assert verdict.outcome == "accepted", verdict
