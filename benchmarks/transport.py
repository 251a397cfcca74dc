"""Groups per second over loopback: ZmqLink -> ZmqHub against bare pyzmq PUSH -> PULL on the very same frames.

One sender process, groups of 8 x 1000 tokens. The two take turns, so that both see the same machine; ours includes encoding,
validation and decoding, the bare one moves ready frames and looks at nothing. Prints one JSON object; takes a few seconds.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue

import numpy as np
import zmq

from async_rl.transport.base import Delivered
from async_rl.transport.codec import encode_group
from async_rl.transport.sockets import DATA_QUEUE
from async_rl.transport.zmq import ZmqHub, ZmqLink
from async_rl.types import Attempt, Group, Trajectory

NUM_SIBLINGS, NUM_TOKENS, PROMPT_TOKENS = 8, 1000, 200
NUM_GROUPS, NUM_ROUNDS = 400, 6
MAX_BYTES = 64 << 20


def make_group(group_id: int) -> Group:
    """A group of the benchmark's size."""
    ids = np.arange(NUM_TOKENS, dtype=np.int32)
    sibling = Trajectory(ids, -ids.astype(np.float32), ids, ids, ids >= 0, "stop", 1.0)
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    return Group(group_id, Attempt(1, 0), "train", "rollout-0#1", prompt, (sibling,) * NUM_SIBLINGS)


def send(orders: SimpleQueue[str], control: str, data: str, bare: str) -> None:
    """The sender process: for each order "ours" or "bare", one round; until "stop"."""

    async def serve() -> None:
        link = ZmqLink(control, max_message_bytes=MAX_BYTES)
        link.open_data(data)
        push = zmq.Context().socket(zmq.PUSH)
        push.set_hwm(DATA_QUEUE)
        push.connect(bare)
        group = make_group(0)
        frames = encode_group(group)
        while (order := orders.get()) != "stop":
            for _ in range(NUM_GROUPS):
                if order == "ours":
                    await link.push(group)
                else:
                    push.send_multipart(frames, copy=False)
        link.close(0)
        push.close(0)

    asyncio.run(serve())


def timed_round(orders: SimpleQueue[str], order: str, receive: Callable[[], int]) -> float:
    """Groups per second of one round, from the first to the last that `receive` counts."""
    orders.put(order)
    num = receive()
    started, first = time.perf_counter(), num
    while num < NUM_GROUPS:
        num += receive()
    return (NUM_GROUPS - first) / (time.perf_counter() - started)


def main() -> None:
    hub = ZmqHub("127.0.0.1", 0, max_message_bytes=MAX_BYTES)
    pull = zmq.Context().socket(zmq.PULL)
    pull.set_hwm(DATA_QUEUE)
    bare = f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}"
    spawn = multiprocessing.get_context("spawn")
    orders: SimpleQueue[str] = spawn.SimpleQueue()
    sender = spawn.Process(target=send, args=(orders, hub.control_address, hub.data_address, bare), daemon=True)
    sender.start()

    def ours() -> int:
        return sum(isinstance(event, Delivered) for event in hub.poll(1.0))

    def bare_one() -> int:
        return 1 if pull.recv_multipart(copy=False) else 0

    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    for turn in range(NUM_ROUNDS):
        for order, receive in (("ours", ours), ("bare", bare_one)):
            rate = timed_round(orders, order, receive)
            if turn > 0:  # the first warms both up
                rates[order].append(rate)
    orders.put("stop")
    sender.join(10)
    hub.close(0)
    pull.close(0)
    group_bytes = sum(len(frame) for frame in encode_group(make_group(0)))
    middle = {name: statistics.median(values) for name, values in rates.items()}
    print(
        json.dumps(
            {
                "group_bytes": group_bytes,
                "groups_per_s": round(middle["ours"]),
                "mb_per_s": round(middle["ours"] * group_bytes / 1e6),
                "tokens_per_s": round(middle["ours"] * NUM_SIBLINGS * NUM_TOKENS),
                "bare_pyzmq_groups_per_s": round(middle["bare"]),
                "ratio": round(statistics.median(a / b for a, b in zip(rates["ours"], rates["bare"], strict=True)), 3),
                "rounds": {name: [round(v) for v in values] for name, values in rates.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
