"""What any wire must do, tried on ZeroMQ over loopback and on queues in one process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from async_rl.transport.base import Delivered, Event, Said, TransportError
from async_rl.transport.codec import BadMessage
from async_rl.transport.memory import MemoryHub, MemoryLink
from async_rl.transport.messages import End, Goodbye, Heartbeat, Message
from async_rl.transport.zmq import ZmqHub, ZmqLink

from .transport_samples import MAX_BYTES, assert_same_group, make_group


class Wire:
    """One hub and links to it, of either kind; all closed at the end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.hub: Any = ZmqHub("127.0.0.1", 0, max_message_bytes=MAX_BYTES) if kind == "zmq" else self.another()
        self.links: list[Any] = []

    def another(self) -> Any:
        if self.kind == "zmq":
            return ZmqHub("127.0.0.1", 0, max_message_bytes=MAX_BYTES)
        return MemoryHub(max_message_bytes=MAX_BYTES)

    def link(self, address: str | None = None, timeout_s: float = 15.0) -> Any:
        cls = ZmqLink if self.kind == "zmq" else MemoryLink
        link = cls(address or self.hub.control_address, max_message_bytes=MAX_BYTES, heartbeat_timeout_s=timeout_s)
        link.open_data(self.hub.data_address)
        self.links.append(link)
        return link

    def nobody(self) -> str:
        """An address where no learner is."""
        gone = self.another()
        gone.close(0)
        return gone.control_address


@pytest.fixture(params=["zmq", "memory"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    made = Wire(request.param)
    yield made
    for link in made.links:
        link.close(0)
    made.hub.close(0)


async def until(hub: Any, done: Callable[[list[Event]], bool], within_s: float = 20.0) -> list[Event]:
    """Poll from a thread, as the learner does, until `done` of all events so far."""
    events: list[Event] = []
    deadline = time.monotonic() + within_s
    while not done(events):
        assert time.monotonic() < deadline, f"only {len(events)} events within {within_s} s"
        events += hub.poll(0.0)
        await asyncio.sleep(0.005)
    return events


async def soon(waiting: Awaitable[Any], within_s: float = 20.0) -> Any:
    return await asyncio.wait_for(waiting, within_s)


async def meet(wire: Wire, link: Any) -> bytes:
    """The peer under which the hub knows this link."""
    await soon(link.send(Heartbeat(phase="hello")))
    (said,) = await until(wire.hub, lambda events: len(events) == 1)
    assert isinstance(said, Said)
    return said.peer


async def test_messages_travel_both_ways(wire: Wire) -> None:
    link = wire.link()
    await soon(link.send(Heartbeat(free_slots=3)))
    (said,) = await until(wire.hub, lambda events: len(events) == 1)
    assert isinstance(said, Said) and said.message == Heartbeat(free_slots=3)
    assert wire.hub.send(said.peer, End(reason="done"))
    assert await soon(link.recv()) == End(reason="done")


async def test_two_rollouts_are_two_peers_and_each_hears_only_its_own(wire: Wire) -> None:
    a, b = wire.link(), wire.link()
    peer_a, peer_b = await meet(wire, a), await meet(wire, b)
    assert peer_a != peer_b
    assert wire.hub.send(peer_a, End(reason="a")) and wire.hub.send(peer_b, End(reason="b"))
    assert (await soon(a.recv()), await soon(b.recv())) == (End(reason="a"), End(reason="b"))


async def test_a_group_arrives_as_it_was_pushed_with_its_size(wire: Wire) -> None:
    group = make_group(lengths=(1000, 0, 20_000))  # small and large frames take different ways through pyzmq
    await soon(wire.link().push(group))
    (delivered,) = await until(wire.hub, lambda events: len(events) == 1)
    assert isinstance(delivered, Delivered)
    assert delivered.num_bytes > 21_000 * 17
    wire.hub.close(0)  # a polled group outlives its socket
    assert_same_group(delivered.group, group)


async def test_a_group_over_the_limit_is_refused_at_the_sender_naming_the_key(wire: Wire) -> None:
    with pytest.raises(BadMessage, match=f"transport.max_message_bytes={MAX_BYTES}"):
        await soon(wire.link().push(make_group(lengths=(70_000,))))


async def test_a_send_to_a_peer_that_left_is_false_and_counted(wire: Wire) -> None:
    link = wire.link()
    peer = await meet(wire, link)
    link.close(0)
    deadline = time.monotonic() + 10
    while wire.hub.send(peer, Heartbeat()):
        assert time.monotonic() < deadline
        wire.hub.poll(0.01)
    assert wire.hub.unsent == Counter(gone=1)


async def test_wake_ends_a_poll_and_poll_keeps_to_its_timeout(wire: Wire) -> None:
    started = time.monotonic()
    threading.Timer(0.1, wire.hub.wake).start()
    assert wire.hub.poll(20.0) == []
    assert 0.05 < time.monotonic() - started < 10
    started = time.monotonic()
    assert wire.hub.poll(0.05) == []
    assert 0.04 < time.monotonic() - started < 10


async def test_a_hub_that_is_not_polled_holds_back_its_rollouts_and_later_gets_everything_once(wire: Wire) -> None:
    link = wire.link()
    num_groups = 400
    pushed = 0

    async def push_all() -> None:
        nonlocal pushed
        for i in range(num_groups):
            await link.push(make_group(i, lengths=(20_000,)))
            pushed += 1

    task = asyncio.create_task(push_all())
    worst_lag_s, before = 0.0, -1
    while pushed != before:  # until it stands still
        before, started = pushed, time.monotonic()
        await asyncio.sleep(0.3)
        worst_lag_s = max(worst_lag_s, time.monotonic() - started - 0.3)
    assert pushed < num_groups and not task.done()
    assert worst_lag_s < 2.0  # a blocked loop would have stood for ever
    events = await until(wire.hub, lambda events: len(events) >= num_groups)
    await soon(task)
    await asyncio.sleep(0.1)
    events += wire.hub.poll(0)
    assert Counter(e.group.group_id for e in events if isinstance(e, Delivered)) == Counter(range(num_groups))


async def test_a_push_without_a_learner_waits_without_blocking_and_can_be_cancelled(wire: Wire) -> None:
    nobody = wire.nobody()
    link = wire.link(nobody)
    link.open_data(nobody)
    push = asyncio.create_task(link.push(make_group()))
    started = time.monotonic()
    for _ in range(10):
        await asyncio.sleep(0.01)
    assert time.monotonic() - started < 2.0
    assert not push.done()
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(push, 3)
    link.open_data(wire.hub.data_address)
    await soon(link.push(make_group(9)))
    events = await until(wire.hub, lambda events: len(events) >= 1)
    assert [e.group.group_id for e in events if isinstance(e, Delivered)] == [9]  # the cancelled one never left


async def test_sends_without_a_learner_end_in_a_sentence_that_names_the_address(wire: Wire) -> None:
    nobody = wire.nobody()
    link = wire.link(nobody, timeout_s=0.2)
    beats = [link.send(Heartbeat()) for _ in range(100)]  # ZeroMQ queues the first few dozen for a learner that may come
    with pytest.raises(TransportError, match=f"cannot reach the learner at {nobody}: no message taken for 0.2 s"):
        await soon(asyncio.gather(*beats))


async def test_reconnect_moves_waiting_calls_to_the_new_learner(wire: Wire) -> None:
    nobody = wire.nobody()
    link = wire.link(nobody)
    link.open_data(nobody)
    recv, push = asyncio.create_task(link.recv()), asyncio.create_task(link.push(make_group(5)))
    await asyncio.sleep(0.05)
    link.reconnect(wire.hub.control_address)
    peer = await meet(wire, link)
    assert wire.hub.send(peer, End(reason="found"))
    assert await soon(recv) == End(reason="found")
    assert not push.done()  # data waits for the address a Welcome names
    link.open_data(wire.hub.data_address)
    await soon(push)
    (delivered,) = await until(wire.hub, lambda events: len(events) == 1)
    assert isinstance(delivered, Delivered) and delivered.group.group_id == 5


async def test_what_a_hub_said_before_it_closed_is_still_heard(wire: Wire) -> None:
    link = wire.link()
    peer = await meet(wire, link)
    said: list[Message] = [*(Heartbeat(free_slots=i) for i in range(50)), End(reason="over")]
    assert all(wire.hub.send(peer, message) for message in said)
    await asyncio.to_thread(wire.hub.close, 10.0)
    await asyncio.sleep(0.3)
    assert [await soon(link.recv()) for _ in said] == said


async def test_a_receive_that_is_cancelled_again_and_again_loses_nothing(wire: Wire) -> None:
    link = wire.link()
    peer = await meet(wire, link)
    heard: list[Message] = []
    for i in range(200):
        recv = asyncio.create_task(link.recv())
        await asyncio.sleep(0)
        wire.hub.send(peer, Heartbeat(free_slots=i))
        await asyncio.sleep(0.001 * (i % 3))
        recv.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            heard.append(await recv)
    while len(heard) < 200:
        heard.append(await soon(link.recv()))
    assert heard == [Heartbeat(free_slots=i) for i in range(200)]


async def test_traffic_both_ways_at_once_never_stalls(wire: Wire) -> None:
    """ZeroMQ's descriptor is edge-triggered: a send may eat the edge that announced a message."""
    link = wire.link()
    peer = await meet(wire, link)
    heard: list[Message] = []

    async def listen() -> None:
        while len(heard) < 300:
            heard.append(await link.recv())

    async def talk() -> None:
        for i in range(300):
            await link.send(Heartbeat(free_slots=i))
            if i % 7 == 0:
                await asyncio.sleep(0)

    async def answer() -> None:
        num_heard = 0
        while num_heard < 300:
            for _ in wire.hub.poll(0):
                wire.hub.send(peer, Heartbeat())
                num_heard += 1
            await asyncio.sleep(0)

    await soon(asyncio.gather(listen(), talk(), answer()))


async def test_every_push_before_a_close_with_linger_arrives(wire: Wire) -> None:
    link = wire.link()
    groups: list[int] = []
    stop = threading.Event()

    def slow_learner() -> None:
        while not stop.is_set() and len(groups) < 200:
            for event in wire.hub.poll(0.1):
                if isinstance(event, Delivered):
                    groups.append(event.group.group_id)
                    time.sleep(0.002)

    reader = threading.Thread(target=slow_learner)
    reader.start()
    try:
        for i in range(200):
            await soon(link.push(make_group(i, lengths=(10_000,))))
        link.close(10.0)
        await soon(asyncio.to_thread(reader.join, 20))
    finally:
        stop.set()
        reader.join(10)
    assert sorted(groups) == list(range(200))


async def test_a_closed_link_says_so(wire: Wire) -> None:
    link = wire.link()
    waiting = asyncio.create_task(link.recv())
    await asyncio.sleep(0.05)
    link.close(0)
    with pytest.raises(TransportError, match="closed"):
        await soon(waiting, 5)
    with pytest.raises(TransportError, match="closed"):
        await soon(link.send(Goodbye(reason="x")), 5)
