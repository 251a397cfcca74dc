"""The wire over ZeroMQ: ROUTER and PULL on the learner, DEALER and PUSH on every rollout.

Owns the sockets of a run; imports zmq, base, codec, intake, admission, sockets. Invariants: `ZmqHub` never blocks but in
`poll`, and nothing a peer sends makes it raise; `ZmqLink` never blocks the loop; a peer is one connection, so when it breaks
the peer is gone and must say Hello again (what was in flight may be lost: groups are kept until acknowledged). Both belong to
the thread that first uses them; forking a process that holds sockets is not supported and is refused at the next use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections import Counter

import zmq

from async_rl.observability.waiting import waiting
from async_rl.transport.admission import Connections, Zap, max_connections, serve_curve
from async_rl.transport.base import Event, Peer, TransportError
from async_rl.transport.codec import CONTROL_MAX_BYTES, BadMessage, decode, encode, encode_group
from async_rl.transport.intake import Intake
from async_rl.transport.keys import LearnerKeys, RolloutKeys
from async_rl.transport.messages import Message
from async_rl.transport.sockets import Awaitable, Owner, SmallMessages, bind, checked_host, connect, make_socket
from async_rl.types import Group

_log = logging.getLogger(__name__)

MAX_POLL_MESSAGES = 512  # per channel and call, good or bad: a flood on one channel cannot starve the other or the caller
MAX_POLL_BYTES = 16 << 20  # of groups: a caller that is slow holds that many beside what queues


class ZmqHub:
    """The learner's end, see `base.Hub`. Beside it: `unsent` counts sends that returned False, by reason (gone, full,
    oversize); `disconnects` counts connections that ended, for whatever cause (a frame over MAXMSGSIZE is one: ZeroMQ
    closes the connection without reading it)."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        max_message_bytes: int,
        max_frame_bytes: int | None = None,
        insecure: bool = False,
        keys: LearnerKeys | None = None,
        heartbeat_timeout_s: float = 15.0,
    ) -> None:
        """Bind control at `port` and data at the next one, or both at the system's choice for port 0. With keys both are for
        those alone whose keys are known. A frame over `max_frame_bytes` is not even read; by default it is as large as a
        message may be. Raises TransportError when an address cannot or may not be bound."""
        host = checked_host(host, insecure or keys is not None)
        self._owner = Owner()
        self._intake = Intake(max_message_bytes)
        self.refused = self._intake.refused
        self.unsent: Counter[str] = Counter()
        self._context = zmq.Context()
        frame_bytes = max_frame_bytes or max_message_bytes
        try:
            self._zap = Zap(self._context, keys.known) if keys is not None else None
            self._control = make_socket(self._context, zmq.ROUTER, heartbeat_timeout_s, max_message_bytes)
            self._said = SmallMessages(self._control)
            self._data = make_socket(self._context, zmq.PULL, heartbeat_timeout_s, frame_bytes)
            most = max_connections(frame_bytes)
            self._connections = [Connections(s, most, self._intake.refuse) for s in (self._control, self._data)]
            if keys is not None:
                serve_curve(self._control, keys)
                serve_curve(self._data, keys)
            self.control_address = bind(self._control, host, port, f"transport.port is {port}")
            self.data_address = bind(
                self._data, host, port and port + 1, f"transport.port is {port}, and data takes the next one"
            )
        except TransportError:
            self._context.destroy(linger=0)
            raise
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poller = zmq.Poller()
        for waited in (self._control, self._data, self._woken.fileno(), *([self._zap.socket] if self._zap else [])):
            self._poller.register(waited, zmq.POLLIN)

    @property
    def disconnects(self) -> int:
        return sum(connections.ended for connections in self._connections)

    def poll(self, timeout_s: float) -> list[Event]:
        """See `base.Hub`. A call takes a bounded share of what is queued; what is left makes the next one return at once.

        Connections that come and go are looked at in every call and end none: thousands a second would have the caller run
        as often.
        """
        self._owner.check()
        for connections in self._connections:
            connections.take()
        ready = dict(self._poller.poll(math.ceil(max(0.0, timeout_s) * 1000)))
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
        if self._zap is not None and self._zap.socket in ready:
            self._zap.take()
        events: list[Event] = []
        if self._control in ready:
            self._take_control(events)
        if self._data in ready:
            self._take_data(events)
        return events

    def send(self, peer: Peer, message: Message) -> bool:
        """See `base.Hub`."""
        self._owner.check()
        content = encode(message)
        if len(content) > CONTROL_MAX_BYTES:
            _log.error("a %s of %d bytes is over the limit of %d", type(message).__name__, len(content), CONTROL_MAX_BYTES)
            return self._not_sent("oversize")
        try:
            self._control.send_multipart([peer, content], zmq.NOBLOCK)
        except zmq.Again:
            return self._not_sent("full")
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            return self._not_sent("gone")
        return True

    def wake(self) -> None:
        """See `base.Hub`."""
        with contextlib.suppress(OSError):  # a full pair wakes as well as one byte more; a closed hub needs no waking
            self._waker.send(b"w")

    def close(self, linger_s: float) -> None:
        """Send what is queued for at most linger_s, then close; groups already polled stay readable."""
        if self._owner.forked:
            return
        for connections in self._connections:
            connections.close()
        self._context.destroy(linger=math.ceil(linger_s * 1000))
        self._waker.close()
        self._woken.close()

    def _take_control(self, events: list[Event]) -> None:
        for _ in range(MAX_POLL_MESSAGES):
            if (frames := self._said.take()) is None:
                return
            if said := self._intake.said(frames):
                events.append(said)

    def _take_data(self, events: list[Event]) -> None:
        num_bytes = 0
        for _ in range(MAX_POLL_MESSAGES):
            if not int(self._data.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            frames = self._data.recv_multipart(zmq.NOBLOCK, copy=False)
            views = [frame.buffer for frame in frames]
            if delivered := self._intake.delivered(views):
                events.append(delivered)
            num_bytes += sum(len(view) for view in views)
            if num_bytes >= MAX_POLL_BYTES:
                return

    def _not_sent(self, reason: str) -> bool:
        self.unsent[reason] += 1
        return False


class ZmqLink:
    """A rollout's end, see `base.Link`. To be made inside the loop that uses it. `refused` counts malformed messages."""

    def __init__(
        self,
        control_address: str,
        *,
        max_message_bytes: int,
        keys: RolloutKeys | None = None,
        heartbeat_timeout_s: float = 15.0,
    ) -> None:
        """Connect the control channel in the background. Raises TransportError when control_address is no address."""
        self._owner = Owner()
        self._context = zmq.Context()
        self._max_message_bytes, self._keys = max_message_bytes, keys
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._control: Awaitable | None = None
        self._data: Awaitable | None = None
        self._data_opened = asyncio.Event()
        self._closed = False
        self.refused: Counter[str] = Counter()
        self.control_address = ""
        self.reconnect(control_address)

    def reconnect(self, control_address: str) -> None:
        """Move to the learner at this address with new sockets. What was queued either way is dropped; pending `recv` and
        `push` go on with the new ones; data waits for `open_data`."""
        self._check()
        fresh = self._open(zmq.DEALER, control_address)
        for old in (self._control, self._data):
            if old:
                old.close()
        self._control, self._data = fresh, None
        self._data_opened.clear()
        self.control_address = control_address

    def open_data(self, address: str) -> None:
        """See `base.Link`. Raises TransportError when `address` is no address."""
        self._check()
        fresh = self._open(zmq.PUSH, address)
        if self._data:
            self._data.close()
        self._data = fresh
        self._data_opened.set()

    async def recv(self) -> Message:
        """See `base.Link`; cancellable without loss. Raises TransportError once the link is closed."""
        while True:
            self._check()
            control = self._current_control()
            frames = control.try_recv()
            if frames is None:
                await control.readable()
                continue
            try:
                if len(frames) != 1:
                    raise BadMessage("frames", f"a control message of {len(frames)} frames where 1 is due")
                return decode(frames[0])
            except BadMessage as e:
                self.refused[e.reason] += 1
                _log.warning("refused a message of the learner: %s", e)
                await asyncio.sleep(0)

    async def send(self, message: Message) -> None:
        """See `base.Link`. A few dozen messages are queued for a learner that is not connected yet; an answer is the only
        proof that one arrived."""
        content = encode(message)
        if len(content) > CONTROL_MAX_BYTES:
            raise TransportError(f"a {type(message).__name__} of {len(content)} bytes is over the limit of {CONTROL_MAX_BYTES}")
        try:
            async with asyncio.timeout(self._heartbeat_timeout_s):
                while True:
                    self._check()
                    control = self._current_control()
                    if control.try_send([content]):
                        return
                    with waiting("the learner to take a message", normal=True):
                        await control.writable()
        except TimeoutError:
            raise TransportError(
                f"cannot reach the learner at {self.control_address}: no message taken for {self._heartbeat_timeout_s} s, "
                "check that it runs and that no firewall is between"
            ) from None

    async def push(self, group: Group) -> None:
        """See `base.Link`. Raises BadMessage for a group that the learner would refuse."""
        frames = encode_group(group)
        num_bytes = sum(len(frame) for frame in frames)
        if num_bytes > self._max_message_bytes:
            raise BadMessage(
                "oversize", f"a group of {num_bytes} bytes, over transport.max_message_bytes={self._max_message_bytes}"
            )
        while True:
            self._check()
            data = self._data
            if data is None:
                await self._data_opened.wait()
            elif data.try_send(frames):
                return
            else:
                await data.writable()

    def close(self, linger_s: float) -> None:
        """Close; what is queued gets linger_s to leave. Blocks for at most that long: the last thing a rollout does."""
        if self._closed or self._owner.forked:
            return
        self._closed = True
        for wire in (self._control, self._data):
            if wire:
                wire.close(linger_s)
        self._data_opened.set()
        self._context.term()

    def _open(self, kind: int, address: str) -> Awaitable:
        made = make_socket(self._context, kind, self._heartbeat_timeout_s, self._max_message_bytes)
        try:
            connect(made, address, self._keys)
        except TransportError:
            made.close()
            raise
        return Awaitable(made)

    def _current_control(self) -> Awaitable:
        assert self._control is not None  # set by __init__
        return self._control

    def _check(self) -> None:
        self._owner.check()
        if self._closed:
            raise TransportError("the link to the learner is closed")
