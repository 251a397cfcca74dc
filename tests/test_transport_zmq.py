"""What only real sockets can get wrong: strangers, floods, forks, frozen peers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from async_rl.transport.base import Delivered, Said, TransportError
from async_rl.transport.codec import encode, encode_group
from async_rl.transport.messages import Error, Heartbeat, Lease, Prepare
from async_rl.transport.zmq import MAX_POLL_MESSAGES, ZmqHub, ZmqLink

from .transport_samples import MAX_BYTES, assert_serves, make_group, make_hub, poll_until

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)


@pytest.fixture
def hub() -> Iterator[ZmqHub]:
    made = make_hub()
    yield made
    made.close(0)


@pytest.fixture
def stranger(hub: ZmqHub) -> Iterator[Callable[[int], zmq.Socket]]:
    """Sockets of somebody who knows ZeroMQ but not us: DEALER to control, PUSH to data."""
    context = zmq.Context()

    def connected(kind: int) -> zmq.Socket:
        made = context.socket(kind)
        made.connect(hub.control_address if kind == zmq.DEALER else hub.data_address)
        return made

    yield connected
    context.destroy(linger=0)


def test_garbage_on_control_is_refused_by_reason_and_the_learner_lives(hub: ZmqHub, stranger: Any) -> None:
    garbage = {
        "msgpack": [b"", os.urandom(64) + b"\xc1", b"\xdf\xff\xff\xff\xff", pickle.dumps({"kind": "hello"})],
        "schema": [msgpack.packb({"kind": "exec", "code": "x"}), msgpack.packb({"kind": "hello", "protocol": "one"})],
    }
    dealer = stranger(zmq.DEALER)
    for messages in garbage.values():
        for message in messages:
            dealer.send(message)
    dealer.send_multipart([b"two", b"frames"])
    poll_until(hub, lambda events: sum(hub.refused.values()) >= 7)
    assert hub.refused["frames"] == 1 and hub.refused["schema"] >= 2 and hub.refused["msgpack"] >= 3
    assert sum(hub.refused.values()) == 7
    assert_serves(hub)


def test_garbage_on_data_is_refused_by_reason_and_the_learner_lives(hub: ZmqHub, stranger: Any) -> None:
    push = stranger(zmq.PUSH)
    good = [bytes(frame) for frame in encode_group(make_group())]
    header = msgpack.unpackb(good[0])
    push.send(pickle.dumps(make_group()))
    push.send_multipart([os.urandom(9)] * 3)
    push.send_multipart([b"\xc1", *good[1:]])
    push.send_multipart([msgpack.packb(header | {"protocol": 99}), *good[1:]])
    push.send_multipart([msgpack.packb(header | {"split": "test"}), *good[1:]])
    push.send_multipart([*good[:2], good[2][:-4], *good[3:]])
    push.send_multipart([bytes(MAX_BYTES // 2)] * 3)
    poll_until(hub, lambda events: sum(hub.refused.values()) >= 7)
    assert hub.refused == {"frames": 2, "msgpack": 1, "protocol": 1, "schema": 1, "shape": 1, "oversize": 1}
    assert_serves(hub)


def test_a_flood_on_one_channel_neither_starves_the_other_nor_holds_poll(hub: ZmqHub, stranger: Any) -> None:
    dealer = stranger(zmq.DEALER)
    num_flood = 4 * MAX_POLL_MESSAGES
    for _ in range(num_flood):
        dealer.send(b"\xc1")
    time.sleep(1.0)  # all of it is in the hub's queue
    hub.poll(10)
    assert 0 < hub.refused["msgpack"] <= MAX_POLL_MESSAGES
    assert_serves(hub)
    poll_until(hub, lambda events: hub.refused["msgpack"] == num_flood)


def _raw(address: str, *parts: bytes) -> socket.socket:
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    made = socket.create_connection((host, int(port)), timeout=10)
    for part in parts:
        made.sendall(part)
    return made


def test_a_peer_that_does_not_speak_zmtp_is_counted(hub: ZmqHub) -> None:
    addresses = (hub.control_address, hub.data_address)
    raws = [_raw(address, GREETING.replace(b"NULL", b"EVIL")) for address in addresses]
    poll_until(hub, lambda events: hub.refused["handshake_auth"] >= 2)
    for raw in [*raws, *(_raw(address, b"GET / HTTP/1.1\r\n\r\n" * 8) for address in addresses)]:
        raw.close()
    poll_until(hub, lambda events: hub.disconnects >= 4)
    assert_serves(hub)


def test_a_header_that_announces_a_gigabyte_costs_the_connection_and_no_memory(hub: ZmqHub) -> None:
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 4) + b"PUSH"
    raw = _raw(hub.data_address, GREETING, bytes([4, len(ready)]) + ready, b"\x02" + struct.pack(">Q", 1 << 30), bytes(4096))
    poll_until(hub, lambda events: hub.disconnects >= 1)
    raw.close()
    # The frame may be read before ZeroMQ has sent its own READY: then no handshake has succeeded, and that is counted.
    assert set(hub.refused) <= {"handshake_protocol"}
    assert_serves(hub)


def test_a_message_over_the_control_limit_is_not_sent_and_counted(hub: ZmqHub, stranger: Any) -> None:
    dealer = stranger(zmq.DEALER)
    dealer.send(encode(Heartbeat()))
    (said,) = poll_until(hub, lambda events: len(events) == 1)
    assert isinstance(said, Said)
    manifest = {"blob": "x" * (17 << 20)}
    prepare = Prepare(
        incarnation=1, version=1, membership=1, backend="gloo", host="h", port=1, tag="t", rank=1, world_size=2,
        manifest=manifest, timeout_s=1,
    )  # fmt: skip
    assert not hub.send(said.peer, prepare)
    assert hub.unsent == {"oversize": 1}
    assert hub.send(said.peer, Error(code="rejoin", text="small"))
    assert dealer.poll(10_000) and b"small" in dealer.recv()


def test_a_rollout_that_stops_reading_fills_its_own_queue_and_send_still_returns(hub: ZmqHub, stranger: Any) -> None:
    dealer = stranger(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.send(encode(Heartbeat()))
    (said,) = poll_until(hub, lambda events: len(events) == 1)
    assert isinstance(said, Said)
    lease = Lease(
        group_id=1, attempt=(1, 0), split="train", born=(1, 0), prompt_id="p", prompt_ids=[], text="x" * 10_000, fields={},
        num_samples=1, max_new_tokens=1, temperature=1, seed=0, timeout_s=1,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while hub.send(said.peer, lease):
        assert time.monotonic() < deadline
    assert hub.unsent == {"full": 1}


def test_a_hub_that_closes_gives_a_slow_rollout_the_linger_to_hear_all() -> None:
    hub = make_hub()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.set_hwm(1)  # takes the next message only when it has read the last
    dealer.connect(hub.control_address)
    dealer.send(encode(Heartbeat()))
    (said,) = poll_until(hub, lambda events: len(events) == 1)
    assert isinstance(said, Said)
    for _ in range(4000):
        assert hub.send(said.peer, Heartbeat(phase="x" * 4000))
    closing = threading.Thread(target=hub.close, args=(20.0,))
    closing.start()
    num_heard = 0
    while dealer.poll(2000):
        dealer.recv()
        num_heard += 1
    closing.join(30)
    context.destroy(linger=0)
    assert num_heard == 4000


CHILD = """
import sys, time, zmq
from async_rl.transport.codec import encode
from async_rl.transport.messages import Heartbeat
dealer = zmq.Context().socket(zmq.DEALER)
dealer.connect(sys.argv[1])
dealer.send(encode(Heartbeat(phase="child")))
time.sleep(60)
"""


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rollout_that_dies_or_freezes_becomes_a_peer_that_is_gone(fate: signal.Signals) -> None:
    hub = make_hub(heartbeat_timeout_s=1.0)
    root = Path(__file__).parents[1]
    child = subprocess.Popen([sys.executable, "-c", CHILD, hub.control_address], cwd=root, start_new_session=True)
    try:
        (said,) = poll_until(hub, lambda events: len(events) == 1, within_s=60)
        assert isinstance(said, Said)
        child.send_signal(fate)
        deadline = time.monotonic() + 20
        while hub.send(said.peer, Heartbeat()):
            assert time.monotonic() < deadline
            hub.poll(0.1)
        assert hub.unsent["gone"] == 1
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)
        hub.close(0)


async def test_a_learner_busy_past_the_heartbeat_timeout_keeps_its_connections_and_every_group() -> None:
    hub = make_hub(heartbeat_timeout_s=0.3)
    link = ZmqLink(hub.control_address, max_message_bytes=MAX_BYTES, heartbeat_timeout_s=0.3)
    link.open_data(hub.data_address)
    try:
        await link.send(Heartbeat())

        async def push_all() -> None:
            for i in range(150):
                await link.push(make_group(i, lengths=(50_000,)))

        task = asyncio.create_task(push_all())
        await asyncio.sleep(1.5)  # five timeouts with a full queue
        assert not task.done()
        groups: list[int] = []
        deadline = time.monotonic() + 20
        while len(groups) < 150:
            assert time.monotonic() < deadline, (len(groups), hub.disconnects)
            groups += [e.group.group_id for e in hub.poll(0) if isinstance(e, Delivered)]
            await asyncio.sleep(0.005)
        await task
        assert groups == list(range(150))
        assert hub.disconnects == 0
    finally:
        link.close(0)
        hub.close(0)


def test_a_second_thread_is_refused_but_may_wake(hub: ZmqHub) -> None:
    hub.poll(0)
    raised: list[str] = []

    def intrude() -> None:
        hub.wake()
        try:
            hub.poll(0)
        except TransportError as e:
            raised.append(str(e))

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join(10)
    assert raised and "two threads" in raised[0]
    assert hub.poll(0) == []


def _use_in_child(hub: ZmqHub, queue: Any) -> None:
    try:
        hub.poll(0)
        queue.put("polled")
    except TransportError as e:
        hub.close(1.0)
        queue.put(str(e))


def test_a_forked_child_is_refused_and_the_parent_goes_on(hub: ZmqHub) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_use_in_child, args=(hub, queue), daemon=True)
    child.start()
    assert "after a fork" in queue.get(timeout=20)
    child.join(20)
    assert_serves(hub)


def test_the_light_floor_imports_no_torch() -> None:
    code = (
        "import sys, async_rl.transport.zmq, async_rl.transport.memory, async_rl.transport.discovery;"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, timeout=60).stdout == b"[]\n"
