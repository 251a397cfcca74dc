"""The ledger under any order of events: long random lives of the state machine, and hypothesis' shrinkable short ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings

from tests.ledger_machine import LedgerMachine

EVENTS: dict[Callable[[LedgerMachine, random.Random], None], float] = {
    LedgerMachine.commit: 6,
    LedgerMachine.grant: 8,
    LedgerMachine.deliver: 8,
    LedgerMachine.take: 8,
    LedgerMachine.settle: 8,
    LedgerMachine.deliver_again_or_nonsense: 2,
    LedgerMachine.time_passes: 3,
    LedgerMachine.filter: 1,
    LedgerMachine.misfortune: 0.7,
    LedgerMachine.checkpoint: 0.7,
    LedgerMachine.crash: 0.2,
}


@pytest.mark.parametrize("seed", range(32))
def test_long_lives_keep_every_rule(seed: int) -> None:
    """The same events, drawn from a plain generator: hypothesis shrinks well, this goes deep."""
    rng = random.Random(seed)
    machine = LedgerMachine()
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(3, 40))]
    on_stale = ("wait", "cancel", "wait", "train")[seed % 4]
    staleness, max_attempts, spare, timeout_s = rng.randint(0, 4), rng.randint(1, 4), rng.randint(0, 20), rng.choice([10, 100])
    machine.begin(staleness, on_stale, sizes, max_attempts, spare, timeout_s)
    for _ in range(400):
        rng.choices(list(EVENTS), list(EVENTS.values()))[0](machine, rng)
        machine.check()
    machine.teardown()


TestLedgerMachine = pytest.mark.timeout(900)(LedgerMachine.TestCase)  # a failure takes minutes to shrink
TestLedgerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
