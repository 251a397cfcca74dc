"""A rollout far faster than the learner: the wire holds it back, loses nothing and holds little."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import psutil

from async_rl.transport.base import Delivered
from async_rl.transport.zmq import ZmqLink
from async_rl.types import Attempt, Group, Trajectory

from .transport_samples import MAX_BYTES, make_hub

COUNT, TOKENS = 1000, 12_000  # a thousand groups of 200 kB


def _group(group_id: int, n: int = TOKENS) -> Group:
    ints = np.zeros(n, np.int32)
    answer = Trajectory(ints, np.zeros(n, np.float32), ints, ints, np.ones(n, bool), "stop", 1.0)
    return Group(group_id, Attempt(1, 0), "train", "fast#1", np.arange(3, dtype=np.int32), (answer,))


def test_a_rollout_that_outruns_the_learner_is_held_back_and_memory_stays_bounded() -> None:
    hub = make_hub()
    blocked_s = 0.0

    async def push_all() -> None:
        nonlocal blocked_s
        link = ZmqLink(hub.control_address, max_message_bytes=MAX_BYTES)
        link.open_data(hub.data_address)
        for i in range(COUNT):
            group = _group(i)
            started = time.monotonic()
            await asyncio.wait_for(link.push(group), 60)
            blocked_s += time.monotonic() - started
        link.close(20)

    sender = threading.Thread(target=lambda: asyncio.run(push_all()), daemon=True)
    process = psutil.Process()
    sender.start()
    got: list[int] = []
    before = most = 0
    deadline = time.monotonic() + 100
    while len(got) < COUNT:
        assert time.monotonic() < deadline, f"{len(got)} of {COUNT}"
        got += [event.group.group_id for event in hub.poll(0.2) if isinstance(event, Delivered)]
        time.sleep(0.005)  # the learner is busy
        if len(got) >= 20:
            before = before or process.memory_info().rss
            most = max(most, process.memory_info().rss)
    sender.join(20)
    hub.close(0)
    assert got == list(range(COUNT)), "nothing is lost, doubled or overtaken"
    assert most - before < 50 << 20, f"{COUNT * TOKENS * 17 >> 20} MiB went through and {most - before >> 20} MiB stayed"
    assert blocked_s > 0
