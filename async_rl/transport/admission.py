"""Who may hold a connection to the learner: with keys, whose key is known; at any time, no more than it can afford.

Owns ZAP (the question that ZeroMQ asks about a client's key) and the count of connections; imports keys, codec and intake.
Invariant: a stranger ends at the handshake, within sockets.HANDSHAKE_S, counted by reason; none of it waits for anybody, and
each call takes a bounded share of what is queued.

ZeroMQ has no limit on connections: out of descriptors, its listener spins, and every other part of the process fails to open
its files. So they are counted by their events, and those beyond the limit are shut as soon as they are seen. Unseen ones are
bounded, too: ZeroMQ's own thread waits when EVENTS_QUEUE events are unread. As the hub reads them once per poll, that is also
the most that strangers can have it do: EVENTS_QUEUE events per poll.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import struct
from collections.abc import Callable

import zmq
from zmq.utils import z85

from async_rl.transport.codec import BadMessage
from async_rl.transport.keys import Known, LearnerKeys
from async_rl.transport.sockets import recv_into

MAX_CONNECTIONS = 512  # to one socket: more than rollouts of one learner; before a handshake each costs up to 36 KiB on control
FEW_CONNECTIONS = 128  # as many are let in however large a frame may be, and however few descriptors there are
MAX_PARTIAL_BYTES = 1 << 30  # that many connections at once may hold in half a frame each
EVENTS_QUEUE = 1001  # 1000 that ZeroMQ takes at its end, and one here
OTHER_DESCRIPTORS = 512  # of files, of torch, of the weight group
MAX_CALL_EVENTS = 1024

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"async_rl"
_EVENT = struct.Struct("=HI")  # the first of an event's two frames (zmq_socket_monitor(3)), the other is the endpoint
_ENDPOINT_BYTES = 256  # more than one has
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_NO_KEY = (zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_WHY = {
    "handshake": "a peer connected and did not say what it wants in time, or went away",
    "handshake_protocol": "a peer that does not speak ZMTP, or whose first frame is over the limit, connected",
    "handshake_auth": "a peer without a key, or with one that is not known here, connected",
    "crowded": "more connections than the learner can afford",
}


class Zap:
    """Answers whether a client's key is known. To be made before any socket of the context is bound."""

    def __init__(self, context: zmq.Context, known: Known) -> None:
        self._known = known
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def take(self) -> None:
        """Answer what was asked."""
        for _ in range(MAX_CALL_EVENTS):
            try:
                version, request, _, _, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            known = mechanism == b"CURVE" and len(credentials) == 1 and z85.encode(credentials[0]) in self._known
            verdict = [b"200", b"OK"] if known else [b"400", b"no known key"]
            self.socket.send_multipart([version, request, *verdict, b"", b""], zmq.NOBLOCK)


def serve_curve(made: zmq.Socket, keys: LearnerKeys) -> None:
    """Let only clients with a known key past the handshake of this socket; nobody, when there is no Zap."""
    made.setsockopt(zmq.CURVE_SERVER, 1)
    made.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret)
    made.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    made.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class Connections:
    """Those to one socket, counted by its events. To be made before the socket is bound.

    An end names its connection, the outcome of a handshake does not. That a peer was silent is said right before its end; for a
    frame that is too large ZeroMQ says nothing, and no handshake has succeeded since that peer came."""

    def __init__(self, monitored: zmq.Socket, limit: int, refuse: Callable[[BadMessage], None]) -> None:
        self._monitored, self._limit, self._refuse = monitored, limit, refuse
        self.ended = 0
        self._open: dict[int, int] = {}  # descriptor -> handshakes that had succeeded when it came
        self._shut: set[int] = set()  # by us: counted already
        self._succeeded = self._refused = 0  # refused: counted already, their ends are still to come
        self._said, self._endpoint = ctypes.create_string_buffer(_EVENT.size), ctypes.create_string_buffer(_ENDPOINT_BYTES)
        self._silent = False  # the next end is of one that said nothing, or not all of it
        address = f"inproc://connections-{monitored.underlying}"
        monitored.monitor(address, _FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self.socket = monitored.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, EVENTS_QUEUE - 1000)
        self.socket.connect(address)

    def take(self) -> bool:
        """Count what has happened; True when there may be more."""
        said, endpoint = self._said, self._endpoint
        for _ in range(MAX_CALL_EVENTS):
            if recv_into(self.socket.underlying, said, _EVENT.size, zmq.NOBLOCK) < 0:
                return False
            size = recv_into(self.socket.underlying, endpoint, _ENDPOINT_BYTES, zmq.NOBLOCK)
            event, value = _EVENT.unpack_from(said)
            if event == zmq.EVENT_ACCEPTED:
                self._came(value, endpoint.raw[: max(size, 0)])  # no NUL ends it
            elif event == zmq.EVENT_DISCONNECTED:
                self._left(value)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._succeeded += 1
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._silent = True
            else:
                no_key = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value in _NO_KEY
                self._count("handshake_auth" if no_key else "handshake_protocol")
                self._refused += 1
        return True

    def close(self) -> None:
        """First what is unread: ZeroMQ's thread, waiting for room, holds a lock that the end of the monitor needs."""
        if self.socket.closed:
            return
        for _ in range(8):
            if not self.take():
                break
        self._monitored.disable_monitor()
        self.socket.close()

    def _came(self, number: int, endpoint: bytes) -> None:
        self._open[number] = self._succeeded
        self._shut.discard(number)
        if len(self._open) > self._limit:
            self._count("crowded")
            _shut(number, endpoint)
            self._shut.add(number)

    def _left(self, number: int) -> None:
        self.ended += 1
        silent, self._silent = self._silent, False
        before = self._open.pop(number, -1)
        if number in self._shut:
            self._shut.discard(number)
        elif silent:
            self._count("handshake")
        elif before == self._succeeded and self._refused:
            self._refused -= 1
        elif before == self._succeeded:
            self._count("handshake_protocol")

    def _count(self, reason: str) -> None:
        self._refuse(BadMessage(reason, _WHY[reason]))


def _shut(number: int, endpoint: bytes) -> None:
    """Have ZeroMQ find its connection ended. The descriptor may be another's by now, so a copy is held
    while it is looked at."""
    with contextlib.suppress(OSError):
        copy = os.dup(number)
        try:
            held = socket.socket(fileno=copy)
        except OSError:  # a file, by now
            os.close(copy)
            return
        with held:
            own = held.getsockname() if held.family in (socket.AF_INET, socket.AF_INET6) else ()
            if own and endpoint.endswith(b":%d" % own[1]) and held.getpeername():
                held.shutdown(socket.SHUT_RDWR)


def max_connections(max_frame_bytes: int) -> int:
    """How many connections one of two sockets may have, so that descriptors and memory suffice. Raises this process's limit
    of descriptors as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * (MAX_CONNECTIONS + EVENTS_QUEUE) + OTHER_DESCRIPTORS
    allowed = wanted if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < min(wanted, allowed):
        soft = min(wanted, allowed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else (soft - OTHER_DESCRIPTORS) // 2 - EVENTS_QUEUE
    by_memory = max(FEW_CONNECTIONS, MAX_PARTIAL_BYTES // max_frame_bytes)
    return max(FEW_CONNECTIONS, min(MAX_CONNECTIONS, room, by_memory))
