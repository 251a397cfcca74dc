"""How ZeroMQ sockets are made here: the one place where they are configured, bound, connected and awaited.

Owns every socket option and the sentences about addresses; imports zmq, base and keys. Invariants: a queue in front of a socket
is finite; no address beyond loopback is bound unless there are keys or the user said so.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import ipaddress
import os
import socket
import threading

import zmq
from zmq.backend.cython import _zmq

from async_rl.transport.base import TransportError
from async_rl.transport.codec import CONTROL_MAX_BYTES, Frame
from async_rl.transport.keys import RolloutKeys

CONTROL_QUEUE = 8192  # messages per peer; a rollout of 4096 slots can be granted all its leases at once
OUTBOX_QUEUE = 64  # control messages of one rollout, waiting for a learner to connect
DATA_QUEUE = 16  # groups per rollout at either end
BACKLOG = 1024  # connections that the system holds for ZeroMQ's thread: a flood must not cost the others a retry of TCP's
SAID_MAX_BYTES = 20 << 10  # one control message of a rollout: a sentence of 4096 characters, whatever the alphabet
SEALED_BYTES = 64  # what CURVE adds to a frame
HANDSHAKE_S = 5.0  # from the first byte of a connection to the end of its handshake

# int zmq_recv(void *socket, void *buffer, size_t bytes, int flags), as zmq.Socket.recv but without letting go of the GIL: it
# never waits here, thousands of messages a second may come, and with each the training thread would win the GIL and lose it.
recv_into = ctypes.PyDLL(_zmq.__file__).zmq_recv
recv_into.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]


def make_socket(context: zmq.Context, kind: int, heartbeat_timeout_s: float, max_message_bytes: int) -> zmq.Socket:
    """A socket of `kind` ROUTER, DEALER (control), PULL or PUSH (data) with every option that we set.

    Control drops a silent peer by ZMTP heartbeats, which ZeroMQ's own thread answers whatever Python does. Data may not
    use them: a receiver that is full stops reading, pings included, and would be taken for dead. It has TCP keepalive.
    """
    made = context.socket(kind)
    control = kind in (zmq.ROUTER, zmq.DEALER)
    made.set_hwm(CONTROL_QUEUE if control else DATA_QUEUE)
    most_bytes = {int(zmq.ROUTER): SAID_MAX_BYTES, int(zmq.DEALER): CONTROL_MAX_BYTES}.get(int(kind), max_message_bytes)
    made.setsockopt(zmq.MAXMSGSIZE, most_bytes + SEALED_BYTES)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.TCP_KEEPALIVE, 1)
    made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, int(heartbeat_timeout_s / 3)))
    made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, int(heartbeat_timeout_s / 3)))
    made.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    if control:
        made.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(heartbeat_timeout_s * 1000 / 3)))
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(heartbeat_timeout_s * 1000)))
    if kind in (zmq.ROUTER, zmq.PULL):
        made.setsockopt(zmq.BACKLOG, BACKLOG)
        made.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    if kind == zmq.ROUTER:
        made.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a peer that is gone is an error, not a silent loss
    if kind == zmq.DEALER:
        made.setsockopt(zmq.SNDHWM, OUTBOX_QUEUE)
    if kind == zmq.PUSH:
        # Queue only for a learner that answered. Not so for control: with IMMEDIATE a connection that ends takes what it had
        # already delivered with it, unread, and the End of a learner that then exits is the one message that must be heard.
        made.setsockopt(zmq.IMMEDIATE, 1)
    if kind in (zmq.DEALER, zmq.PUSH):
        made.setsockopt(zmq.RECONNECT_IVL, 100)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    return made


def checked_host(host: str, beyond: bool) -> str:
    """The numeric address of `host`, in brackets if IPv6. Raises TransportError when it cannot be bound, or lies beyond
    loopback and may not be."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise TransportError(f"transport.host is {host}, which does not resolve: give an address of this machine") from None
    address = ipaddress.ip_address(str(sorted(found)[0][4][0]).partition("%")[0])  # IPv4 sorts first
    if address.is_unspecified:
        raise TransportError(f"transport.host is {host}, which no rollout can connect to: give the address of one interface")
    if not address.is_loopback and not beyond:
        raise TransportError(
            f"transport.host is {host}, beyond loopback without keys: make them with `async-rl keys DIR` and set "
            "transport.keys=DIR, keep 127.0.0.1, or set transport.insecure=true on a network you trust"
        )
    return f"[{address}]" if address.version == 6 else str(address)


def bind(made: zmq.Socket, host: str, port: int, key: str) -> str:
    """Bind to a checked host and return the address in force; port 0 is the system's choice. `key` begins the sentence of a
    TransportError."""
    if port > 65535:
        raise TransportError(f"{key} needs port {port}, which does not exist: choose a lower transport.port")
    made.setsockopt(zmq.IPV6, host.startswith("["))
    try:
        made.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as e:
        causes = {
            errno.EADDRINUSE: "is in use: stop its owner, choose another transport.port, or 0 to let the system choose",
            errno.EACCES: "is not allowed: choose a transport.port above 1023, or 0 to let the system choose",
            errno.EADDRNOTAVAIL: "cannot be bound: transport.host is not an address of this machine",
            errno.ENODEV: "cannot be bound: transport.host is not an address of this machine",
        }
        cause = causes.get(e.errno or 0, f"cannot be bound ({e.strerror})")
        raise TransportError(f"{key}: port {port} on {host} {cause}") from None
    return made.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def connect(made: zmq.Socket, address: str, keys: RolloutKeys | None) -> None:
    """Connect in the background, with keys to the learner that holds the pinned one and to nobody else; raises
    TransportError when `address` is no address."""
    made.setsockopt(zmq.IPV6, "[" in address)
    if keys is not None:
        made.setsockopt(zmq.CURVE_SERVERKEY, keys.learner)
        made.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public)
        made.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
    try:
        made.connect(address)
    except (zmq.ZMQError, UnicodeError) as e:
        raise TransportError(f"learner address {address!r} is not of the form tcp://HOST:PORT ({e})") from None


class Owner:
    """ZeroMQ sockets belong to one thread of one process: the first that uses them. Raises for any other."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._thread: int | None = None

    def check(self) -> None:
        """Raises TransportError in a forked child and, once a first thread has called, in any other thread."""
        if self.forked:
            raise TransportError("a socket of the parent process was used after a fork: open sockets in the child, or spawn")
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            raise TransportError("a socket was used by two threads: only the thread that first used it may go on")

    @property
    def forked(self) -> bool:
        return self._pid != os.getpid()


class SmallMessages:
    """Those of a socket whose frames have a limit, read into one buffer and without letting go of the GIL."""

    def __init__(self, made: zmq.Socket) -> None:
        self._socket = made
        self._buffer = ctypes.create_string_buffer(made.getsockopt(zmq.MAXMSGSIZE))

    def take(self) -> list[bytes] | None:
        """The frames of the next message, or None when there is none."""
        frames: list[bytes] = []
        while True:
            size = recv_into(self._socket.underlying, self._buffer, len(self._buffer), zmq.NOBLOCK)
            if size < 0:
                return frames or None
            frames.append(ctypes.string_at(self._buffer, min(size, len(self._buffer))))
            if not self._socket.getsockopt(zmq.RCVMORE):
                return frames


class Awaitable:
    """A socket inside an asyncio loop: tries that never block, and two conditions to await.

    Not zmq.asyncio: there a `recv` that is cancelled at the wrong instant loses its message, and closing a socket (to move to
    another learner) cancels the tasks that wait on it. Here nothing is taken from the socket but in a try, and `close` only
    wakes the waiters. ZeroMQ's descriptor is edge-triggered and any operation may eat the edge, so each ends in `_refresh`.
    """

    def __init__(self, made: zmq.Socket) -> None:
        self._socket = made
        self._loop = asyncio.get_running_loop()
        self._readable, self._writable = asyncio.Event(), asyncio.Event()
        self._loop.add_reader(made.fileno(), self._refresh)
        self._refresh()

    def try_recv(self) -> list[bytes] | None:
        """The next message, or None when there is none."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        finally:
            self._refresh()

    def try_send(self, frames: list[Frame]) -> bool:
        """False when nobody is connected or the queue is full."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
            return True
        except zmq.Again:
            return False
        finally:
            self._refresh()

    async def readable(self) -> None:
        """Wait for a message, or for `close`."""
        await self._readable.wait()

    async def writable(self) -> None:
        """Wait for room in the queue, or for `close`."""
        await self._writable.wait()

    def close(self, linger_s: float = 0.0) -> None:
        """Give the queue up to linger_s to drain, for which the context's `term` waits; wakes whoever waits here."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=int(linger_s * 1000))
        self._readable.set()
        self._writable.set()

    def _refresh(self) -> None:
        events = int(self._socket.getsockopt(zmq.EVENTS))
        for event, condition in ((zmq.POLLIN, self._readable), (zmq.POLLOUT, self._writable)):
            if events & event:
                condition.set()
            else:
                condition.clear()
