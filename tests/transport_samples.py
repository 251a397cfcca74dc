"""Groups and hubs for the transport's tests, and what it means that two groups are the same or that a hub serves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from async_rl.transport.base import Delivered, Event, Said
from async_rl.transport.codec import ARRAYS
from async_rl.transport.messages import Heartbeat
from async_rl.transport.zmq import ZmqHub, ZmqLink
from async_rl.types import Attempt, Group, Trajectory

MAX_BYTES = 1 << 20


def make_trajectory(
    num_tokens: int, seed: int = 0, reward: float = 1.0, error: str = "", scores: dict[str, float] | None = None
) -> Trajectory:
    rng = np.random.default_rng(seed)
    return Trajectory(
        token_ids=rng.integers(0, 50_000, num_tokens).astype(np.int32),
        logprobs=-rng.random(num_tokens).astype(np.float32),
        incarnations=np.full(num_tokens, 1, np.int32),
        versions=rng.integers(0, 9, num_tokens).astype(np.int32),
        mask=rng.random(num_tokens) < 0.9,
        finish_reason="stop",
        reward=reward,
        error=error,
        scores=scores or {},
    )


def make_group(group_id: int = 7, lengths: tuple[int, ...] = (3, 0, 5), prompt_tokens: int = 4) -> Group:
    return Group(
        group_id=group_id,
        attempt=Attempt(2, 1),
        split="train",
        rollout_id="rollout-0#1",
        prompt_ids=np.arange(prompt_tokens, dtype=np.int32),
        trajectories=tuple(make_trajectory(n, seed=group_id * 1000 + i) for i, n in enumerate(lengths)),
    )


def assert_same_group(got: Group, sent: Group) -> None:
    """Equal bit for bit, NaN included, and of the types that types.py promises."""
    for name in ("group_id", "attempt", "split", "rollout_id"):
        assert getattr(got, name) == getattr(sent, name)
    assert len(got.trajectories) == len(sent.trajectories)
    pairs = [(got.prompt_ids, sent.prompt_ids)]
    for a, b in zip(got.trajectories, sent.trajectories, strict=True):
        assert (a.finish_reason, a.error, a.scores) == (b.finish_reason, b.error, b.scores)
        np.testing.assert_equal(a.reward, b.reward)
        pairs += [(getattr(a, name), getattr(b, name)) for name, _ in ARRAYS[1:]]
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def make_hub(host: str = "127.0.0.1", port: int = 0, **options: Any) -> ZmqHub:
    return ZmqHub(host, port, **cast(Any, {"max_message_bytes": MAX_BYTES} | options))


def poll_until(hub: ZmqHub, done: Callable[[list[Event]], bool], within_s: float = 20.0) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + within_s
    while not done(events):
        assert time.monotonic() < deadline, f"{len(events)} events, refused {hub.refused}, disconnects {hub.disconnects}"
        events += hub.poll(0.05)
    return events


def assert_serves(hub: ZmqHub) -> None:
    """A rollout that comes now is heard on both channels."""

    async def visit() -> None:
        link = ZmqLink(hub.control_address, max_message_bytes=MAX_BYTES)
        link.open_data(hub.data_address)
        await asyncio.wait_for(link.send(Heartbeat(phase="visit")), 10)
        await asyncio.wait_for(link.push(make_group(4242)), 10)
        link.close(5)

    visitor = threading.Thread(target=lambda: asyncio.run(visit()))
    visitor.start()

    def both(events: list[Event]) -> bool:
        said = any(isinstance(e, Said) and e.message == Heartbeat(phase="visit") for e in events)
        return said and any(isinstance(e, Delivered) and e.group.group_id == 4242 for e in events)

    poll_until(hub, both)
    visitor.join(10)
