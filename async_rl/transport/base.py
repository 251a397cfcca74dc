"""What learner and rollouts need of a wire, whichever it is (ZeroMQ, or queues in one process).

`Hub` is the learner's end, driven by one IO thread. `Link` is a rollout's end, inside its asyncio loop.
Invariant: nothing is dropped without a count; a bad message is refused with a reason and never raises out of `poll`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from async_rl.transport.messages import Message
from async_rl.types import Group

Peer = bytes  # opaque routing identity of one connection


class TransportError(Exception):
    """A wire that cannot be had (port in use, learner unreachable); one sentence for the user."""


@dataclass(frozen=True)
class Said:
    """A control message that arrived from a peer."""

    peer: Peer
    message: Message


@dataclass(frozen=True)
class Delivered:
    """A group that arrived on the data channel. Its sender is `group.rollout_id`."""

    group: Group
    num_bytes: int


Event = Said | Delivered


class Hub(Protocol):
    """The learner's end. All but `wake` belong to the IO thread."""

    control_address: str
    data_address: str
    refused: Counter[str]  # reason -> malformed messages, both channels

    @property
    def disconnects(self) -> int:
        """Connections that have ended, whatever the cause."""
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Everything that has arrived, waiting at most timeout_s for the first; [] on wake or timeout."""
        ...

    def send(self, peer: Peer, message: Message) -> bool:
        """Never blocks. False (and counted) when the peer is gone or its queue is full."""
        ...

    def wake(self) -> None:
        """Make a running `poll` return; callable from any thread."""
        ...

    def close(self, linger_s: float) -> None: ...


class Link(Protocol):
    """A rollout's end. Reconnects by itself; what was sent while nobody listened may be lost, so groups are acked."""

    async def recv(self) -> Message:
        """The next control message; malformed ones are counted and skipped."""
        ...

    async def send(self, message: Message) -> None:
        """Queue a control message; raises TransportError when the queue stays full for a heartbeat timeout."""
        ...

    def open_data(self, address: str) -> None:
        """Connect (or reconnect) the data channel to the address a Welcome named."""
        ...

    async def push(self, group: Group) -> None:
        """Push a group; waits while the queue is full, without blocking the loop; cancellable."""
        ...

    def close(self, linger_s: float) -> None: ...
