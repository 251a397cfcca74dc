"""A run of the ledger in simulated time: rollouts with random speeds and long tails, weights that arrive late.

Every number of a run follows from its seed. A run that waits for something that cannot come runs out of events, and says
what it waited for.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from async_rl.algorithms.schedules import group_size_at, num_prompts
from async_rl.data.ledger import Ledger
from async_rl.data.record import Record
from async_rl.types import Prompt
from tests.ledger_samples import counter, make_group, make_rules

NUM_SLOTS = 6


@dataclass
class Rollout:
    name: str
    speed: float
    version: int = 0
    held: int = 0


@dataclass
class Simulation:
    """One learner and three rollouts over the real ledger; `filtered` is the share of groups without signal. `sizes` are
    groups per step, `answers` those of a group that is dealt for a step."""

    seed: int
    staleness: int
    on_stale: str
    sizes: list[int]
    filtered: float
    death_s: float | None = None  # the fastest rollout dies then
    answers: Callable[[int], int] = lambda step: 2
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    lags: Counter[int] = field(default_factory=Counter)
    now: float = 0.0
    busy: bool = False
    num_filtered: int = 0
    batches: list[list[int]] = field(default_factory=list)  # for each step, the sizes of the groups that it took

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        rules = make_rules(
            max_staleness=self.staleness,
            on_stale=self.on_stale,
            num_steps=len(self.sizes),
            groups_per_step=lambda k: self.sizes[k],
            lease_timeout_s=60.0,
            max_attempts=5,
            max_refill=8,
        )
        self.ledger = Ledger(rules, 1)
        self.prompts = counter()
        self.batch: list[int] = []
        self.rollouts = [Rollout(f"r{i}", speed) for i, speed in enumerate((1.0, 0.5, 0.2))]

    def run(self) -> None:
        for rollout in self.rollouts:
            self.ledger.committed(rollout.name, 0)
        if self.death_s is not None:
            self.later(self.death_s, self.die)
        self.tick()
        while self.ledger.version < len(self.sizes):
            assert self.events, f"deadlock: {self.ledger.why_not(self.ledger.version, self.now)}"
            self.now, _, act = heapq.heappop(self.events)
            act()
            self.turn()

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay_s, self.rng.getrandbits(60), act))

    def deal(self, step: int) -> tuple[Prompt, int]:
        return self.prompts(step)[0], self.answers(step)

    def turn(self) -> None:
        """What the learner does after every event: grant what it may, train when it can."""
        ledger = self.ledger
        for rollout in self.rollouts:
            while rollout.held < NUM_SLOTS and (record := ledger.grant(rollout.name, self.deal, self.now)):
                rollout.held += 1
                self.work(rollout, record)
        if self.busy or ledger.version == len(self.sizes):
            return
        ledger.cancel_stale(ledger.version)
        batch = ledger.take(ledger.version)
        if batch is not None:
            self.busy = True
            self.lags.update(record.lag for record in batch)
            self.batch = [record.size for record in batch]
            ids = [record.group_id for record in batch]
            self.later(self.rng.uniform(0.5, 1.5), lambda: self.trained(ids))

    def work(self, rollout: Rollout, record: Record) -> None:
        """A long-tailed answer whose first token is of the weights served now, its last of those served at its end."""
        attempt, first = record.attempt, rollout.version
        length = self.rng.paretovariate(1.1) / rollout.speed

        def done() -> None:
            rollout.held -= 1
            if rollout not in self.rollouts:
                return
            group = make_group(record, [first, rollout.version], attempt=attempt, rollout_id=rollout.name)
            accepted = self.ledger.accept(group, 60, self.now).outcome == "accepted"
            if accepted and self.rng.random() < self.filtered and self.ledger.may_filter():
                self.ledger.drop([group.group_id], "filtered")
                self.num_filtered += 1

        self.later(min(length, 500.0), done)

    def trained(self, ids: list[int]) -> None:
        self.busy = False
        if self.rng.random() < 0.05:
            self.ledger.drop(ids, "skipped")
            return
        version = self.ledger.version + 1
        self.ledger.trained(ids, version)
        self.batches.append(self.batch)
        for rollout in self.rollouts:
            self.later(self.rng.uniform(0.1, 1.0), lambda r=rollout: self.committed(r, version))

    def committed(self, rollout: Rollout, version: int) -> None:
        if rollout in self.rollouts and version > rollout.version:
            rollout.version = version
            self.ledger.committed(rollout.name, version)

    def die(self) -> None:
        self.ledger.leave(self.rollouts.pop(0).name, self.now)

    def tick(self) -> None:
        self.ledger.expire(self.now)
        if self.now < 20_000:
            self.later(5.0, self.tick)


def finished(simulation: Simulation) -> Simulation:
    simulation.run()
    ledger = simulation.ledger
    ledger.end()
    books = ledger.books()
    assert books["balanced"], books
    assert books["groups"]["trained"] == sum(simulation.sizes)
    assert all(books["groups"][state] == 0 for state in ("waiting", "leased", "ready", "taken"))
    return simulation


@pytest.mark.parametrize("filtered", [0.0, 0.5])
@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_with_long_tails_and_waiting_the_run_ends_and_lag_keeps_its_bound(seed: int, staleness: int, filtered: float):
    sizes = [4 + (k // 5) % 3 for k in range(25)]  # G(k) changes by schedule
    simulation = finished(Simulation(seed, staleness, "wait", sizes, filtered, death_s=15.0))
    assert max(simulation.lags) <= staleness
    assert staleness or set(simulation.lags) == {0}
    assert (simulation.num_filtered > 20) == (filtered > 0)
    ended = simulation.ledger.books()["groups"]["dropped"]["ended"]
    assert ended == 0, "the last steps leave nothing behind"


@pytest.mark.parametrize("sizes", [[1] * 30, [8, 1, 1, 6, 2] * 5, list(range(1, 21)), list(range(20, 0, -1))])
def test_any_schedule_of_group_counts_ends(sizes: list[int]):
    simulation = finished(Simulation(3, 3, "wait", sizes, 0.3))
    assert max(simulation.lags) <= 3


@pytest.mark.parametrize("ends", [(4, 16), (16, 4)])
@pytest.mark.parametrize("staleness", [0, 3])
def test_a_group_size_on_its_way_keeps_the_answers_of_each_step(staleness: int, ends: tuple[int, int]):
    """With long tails, so groups arrive out of turn, and a rollout that dies; but nothing is filtered."""

    def answers(step: int) -> int:
        return group_size_at(step, 60, *ends)

    sizes = [num_prompts(64, answers(step)) for step in range(60)]
    simulation = finished(Simulation(7, staleness, "wait", sizes, 0.0, death_s=15.0, answers=answers))
    own = [size == answers(step) for step, batch in enumerate(simulation.batches) for size in batch]
    totals = [sum(batch) for batch in simulation.batches]
    assert len(set(sizes)) == 3 and max(simulation.lags) <= staleness
    assert totals == [64] * 60 if staleness == 0 else sum(own) > 0.97 * len(own) and totals.count(64) > 54
    assert sum(totals) == pytest.approx(64 * 60, rel=0.01)


def test_a_larger_bound_is_used_and_is_faster():
    times = [finished(Simulation(4, staleness, "wait", [4] * 40, 0.0)) for staleness in (0, 3)]
    assert times[1].now < 0.8 * times[0].now, "staleness must buy time under long tails"
    assert max(times[1].lags) == 3


def test_cancelling_keeps_the_bound_without_waiting_for_the_slowest():
    waiting, cancelling = (finished(Simulation(5, 1, how, [4] * 40, 0.0)) for how in ("wait", "cancel"))
    assert max(cancelling.lags) <= 1
    assert cancelling.ledger.books()["attempts"]["cancelled"] > 0
    assert cancelling.now < waiting.now


def test_training_late_exceeds_the_bound_and_says_by_how_much():
    simulation = finished(Simulation(6, 1, "train", [4] * 40, 0.0))
    assert max(simulation.lags) > 1 and sum(simulation.lags.values()) >= 160
