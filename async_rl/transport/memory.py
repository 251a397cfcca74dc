"""The wire on queues in one process: the same two ends as zmq.py, for tests and for runs without sockets.

Owns no socket; imports base, codec and intake. Everything passes through the codec, so what works here is what can travel.
Invariant: as over ZeroMQ, a link never blocks its loop, queues are finite, and a peer that left is gone. The hub is polled
from any one thread; each link belongs to the loop it was made in.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable

from async_rl.transport.base import Event, Peer, TransportError
from async_rl.transport.codec import CONTROL_MAX_BYTES, BadMessage, Frame, decode, encode, encode_group
from async_rl.transport.intake import Intake
from async_rl.transport.messages import Message
from async_rl.types import Group

DATA_QUEUE = 16  # groups, over all links of a hub
CONTROL_QUEUE = 8192  # messages per link
_ids = itertools.count(1)
_hubs: weakref.WeakValueDictionary[str, MemoryHub] = weakref.WeakValueDictionary()


class MemoryHub:
    """The learner's end, see `base.Hub`; links find it by its addresses, which begin with memory://."""

    def __init__(self, *, max_message_bytes: int) -> None:
        self.disconnects = 0  # a queue does not break
        self.control_address = self.data_address = f"memory://{next(_ids)}"
        self._intake = Intake(max_message_bytes)
        self.refused = self._intake.refused
        self.unsent: Counter[str] = Counter()
        self.changed = threading.Condition()  # guards all that follows
        self.control: deque[tuple[Peer, bytes]] = deque()
        self.data: deque[list[Frame]] = deque()
        self.links: dict[Peer, MemoryLink] = {}
        self.closed = False
        self._woken = False
        _hubs[self.control_address] = self

    def poll(self, timeout_s: float) -> list[Event]:
        """See `base.Hub`."""
        with self.changed:
            self.changed.wait_for(lambda: self.control or self.data or self._woken, max(0.0, timeout_s))
            self._woken = False
            control, data = list(self.control), list(self.data)
            self.control.clear()
            self.data.clear()
            waiting = list(self.links.values())
        for link in waiting:
            link.notify()
        events = [self._intake.said(said) for said in control] + [self._intake.delivered(frames) for frames in data]
        return [event for event in events if event is not None]

    def send(self, peer: Peer, message: Message) -> bool:
        """See `base.Hub`."""
        content = encode(message)
        with self.changed:
            link = self.links.get(peer)
        reason = "gone" if link is None else "oversize" if len(content) > CONTROL_MAX_BYTES else link.deliver(content)
        if reason:
            self.unsent[reason] += 1
        return not reason

    def wake(self) -> None:
        """See `base.Hub`."""
        with self.changed:
            self._woken = True
            self.changed.notify_all()

    def close(self, linger_s: float) -> None:
        """What was sent stays with the links, whatever linger_s; from now on they find nobody."""
        with self.changed:
            self.closed = True
            self.links.clear()


class MemoryLink:
    """A rollout's end, see `base.Link`. To be made inside the loop that uses it."""

    def __init__(self, control_address: str, *, max_message_bytes: int, heartbeat_timeout_s: float = 15.0) -> None:
        self._max_message_bytes = max_message_bytes
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._inbox: deque[bytes] = deque()
        self._hub: MemoryHub | None = None
        self._data: MemoryHub | None = None
        self._peer = b""
        self._closed = False
        self.refused: Counter[str] = Counter()
        self.control_address = ""
        self.reconnect(control_address)

    def reconnect(self, control_address: str) -> None:
        """Move to the hub at this address, as a new peer; what was queued for this link is dropped."""
        self._leave()
        self._inbox.clear()
        self._peer = f"memory-{next(_ids)}".encode()
        self._hub, self._data = _hubs.get(control_address), None
        self.control_address = control_address
        if self._hub:
            with self._hub.changed:
                if not self._hub.closed:
                    self._hub.links[self._peer] = self

    def open_data(self, address: str) -> None:
        """See `base.Link`."""
        self._data = _hubs.get(address)
        self._changed.set()

    async def recv(self) -> Message:
        """See `base.Link`. Raises TransportError once the link is closed."""
        while True:
            await self._until(lambda: bool(self._inbox))
            try:
                return decode(self._inbox.popleft())
            except BadMessage as e:
                self.refused[e.reason] += 1

    async def send(self, message: Message) -> None:
        """See `base.Link`."""
        content = encode(message)
        deadline = time.monotonic() + self._heartbeat_timeout_s
        if not await self._until(lambda: self._say(content), deadline):
            raise TransportError(
                f"cannot reach the learner at {self.control_address}: no message taken for {self._heartbeat_timeout_s} s"
            )

    async def push(self, group: Group) -> None:
        """See `base.Link`. Raises BadMessage for a group that the learner would refuse."""
        frames = encode_group(group)
        num_bytes = sum(len(frame) for frame in frames)
        if num_bytes > self._max_message_bytes:
            raise BadMessage(
                "oversize", f"a group of {num_bytes} bytes, over transport.max_message_bytes={self._max_message_bytes}"
            )
        await self._until(lambda: self._put(frames))

    def close(self, linger_s: float) -> None:
        """Close; what was pushed is already with the hub."""
        self._closed = True
        self._leave()
        self._changed.set()

    def deliver(self, content: bytes) -> str:
        """Called by the hub from its thread; the reason why not, or ''."""
        if len(self._inbox) >= CONTROL_QUEUE:
            return "full"
        self._inbox.append(content)
        self.notify()
        return ""

    def notify(self) -> None:
        """Called by the hub from its thread: there may be room or mail."""
        with contextlib.suppress(RuntimeError):  # the link's loop has ended, and with it whoever could wait
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _until(self, done: Callable[[], bool], deadline: float = float("inf")) -> bool:
        """Try `done` after each change until it is True, or False at the deadline."""
        while True:
            if self._closed:
                raise TransportError("the link to the learner is closed")
            self._changed.clear()
            if done():
                return True
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            # not wait_for: in Python 3.11 it loses a cancellation that meets a change
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(remaining_s, 3600)):
                    await self._changed.wait()

    def _say(self, content: bytes) -> bool:
        hub = self._hub
        if hub is None:
            return False
        with hub.changed:
            if self._peer not in hub.links or len(hub.control) >= CONTROL_QUEUE:
                return False
            hub.control.append((self._peer, content))
            hub.changed.notify_all()
        return True

    def _put(self, frames: list[Frame]) -> bool:
        hub = self._data
        if hub is None:
            return False
        with hub.changed:
            if hub.closed or len(hub.data) >= DATA_QUEUE:
                return False
            hub.data.append(frames)
            hub.changed.notify_all()
        return True

    def _leave(self) -> None:
        if self._hub:
            with self._hub.changed:
                self._hub.links.pop(self._peer, None)
