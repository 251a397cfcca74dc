"""What a rollout has finished and not yet heard of: pushed in order, again when it must, and never for ever."""

from __future__ import annotations

import asyncio

import numpy as np

from async_rl.rollout.outbox import Outbox
from async_rl.transport.codec import BadMessage
from async_rl.transport.messages import Ack
from async_rl.types import Attempt, Group

from .test_rollout_parts import until


class Wire:
    """A link whose push blocks while `open` is unset."""

    def __init__(self) -> None:
        self.pushed: list[tuple[int, str]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.refuse: set[int] = set()

    async def push(self, group: Group) -> None:
        await self.open.wait()
        if group.group_id in self.refuse:
            raise BadMessage("oversize", "too large")
        self.pushed.append((group.group_id, group.rollout_id))


def group(group_id: int) -> Group:
    return Group(group_id, Attempt(1, 0), "train", "", np.zeros(1, np.int32), ())


def ack(group_id: int, outcome: str = "accepted") -> Ack:
    return Ack.model_validate({"group_id": group_id, "attempt": (1, 0), "outcome": outcome})


async def test_the_outbox_pushes_in_order_and_again_over_the_next_connection_until_acknowledged() -> None:
    outbox, wire = Outbox(resend_s=60), Wire()
    running = asyncio.create_task(outbox.run(wire, "a#1"))  # type: ignore[arg-type]
    for group_id in (3, 1, 2):
        outbox.put(group(group_id))
    await until(lambda: len(wire.pushed) == 3)
    outbox.ack(ack(1))
    outbox.ack(ack(1, "duplicate"))
    running.cancel()
    running = asyncio.create_task(outbox.run(wire, "a#2"))  # type: ignore[arg-type]
    await until(lambda: len(wire.pushed) == 5)
    running.cancel()
    assert wire.pushed == [(3, "a#1"), (1, "a#1"), (2, "a#1"), (3, "a#2"), (2, "a#2")]
    outbox.ack(ack(3))
    outbox.ack(ack(2, "refused"))
    assert len(outbox) == 0
    assert {k: v for k, v in outbox.counts.items() if "ack" in k} == {"ack/accepted": 2, "ack/refused": 1, "ack/again": 1}


async def test_a_group_whose_ack_is_lost_is_pushed_again() -> None:
    outbox, wire = Outbox(resend_s=0.05), Wire()
    outbox.put(group(1))
    running = asyncio.create_task(outbox.run(wire, "a#1"))  # type: ignore[arg-type]
    await until(lambda: len(wire.pushed) >= 2)
    running.cancel()
    assert outbox.counts["pushed_again"] >= 1


async def test_a_full_wire_does_not_block_the_loop() -> None:
    outbox, wire = Outbox(resend_s=60), Wire()
    wire.open.clear()
    outbox.put(group(1))
    running = asyncio.create_task(outbox.run(wire, "a#1"))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    outbox.put(group(2))
    wire.open.set()
    await until(lambda: len(wire.pushed) == 2)
    running.cancel()


async def test_a_group_that_cannot_travel_is_dropped_and_counted() -> None:
    outbox, wire = Outbox(resend_s=60), Wire()
    wire.refuse = {1}
    outbox.put(group(1))
    outbox.put(group(2))
    running = asyncio.create_task(outbox.run(wire, "a#1"))  # type: ignore[arg-type]
    await until(lambda: len(wire.pushed) == 1)
    running.cancel()
    assert (len(outbox), outbox.counts["unsendable/oversize"]) == (1, 1)
