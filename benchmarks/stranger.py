"""The stranger of benchmarks/flood.py: `python -m benchmarks.stranger CONTROL DATA REPLAYED`, told "on" and "off" on stdin.

Light, so that its start disturbs nobody. Says "ready", and after "stop" how many messages of each kind it has sent.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import zmq

NULL = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)  # ZMTP's greeting
CURVE = NULL.replace(b"NULL\0", b"CURVE")
RATE_PER_MIN = 110_000  # asked for; what was sent is counted
TICK_S = 0.01
MAX_AT_ONCE = 500
NUM_HELD = 64  # connections that stay open, the oldest is closed for a new one


def ready(kind: bytes) -> bytes:
    """The READY command of a NULL handshake."""
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return bytes([4, len(body)]) + body


def stranger(control: str, data: str, replayed: dict[str, str]) -> None:
    """Floods while the last line of stdin is "on"; prints what was sent, by kind, after "stop"."""
    raw = {
        "random": lambda _: os.urandom(256),
        "null": lambda kind: NULL + ready(kind) + b"\x00\x40" + os.urandom(64),
        "header": lambda kind: NULL + ready(kind) + b"\x02" + struct.pack(">Q", 1 << 40),
        "header_curve": lambda _: CURVE + b"\x06" + struct.pack(">Q", 1 << 40),
        "replayed": lambda kind: bytes.fromhex(replayed[kind.decode()]),
    }
    sent: Counter[str] = Counter()
    peers = _peers(control, data)
    turns = itertools.cycle(
        [(name, say, kind, where) for name, say in raw.items() for kind, where in ((b"DEALER", control), (b"PUSH", data))]
        + [("frames", peer, b"", "") for peer in peers["frames"]]
    )
    held: list[socket.socket] = []
    started = time.monotonic()
    print("ready", flush=True)
    for on in _switch():
        started, due = (
            (time.monotonic(), int(RATE_PER_MIN / 60 * (time.monotonic() - started))) if on else (time.monotonic(), 0)
        )
        left = min(due, MAX_AT_ONCE)
        for name, say, kind, where in itertools.islice(turns, 2 * left):  # a kind that finds no way in costs the others nothing
            done = left > 0 and (_send(say) if isinstance(say, zmq.Socket) else _connect(held, where, say(kind)))
            sent[name] += done
            left -= done
    sent["wrong_key"] = sum(_failures(monitor) for monitor in peers["monitors"])
    print(json.dumps(sent), flush=True)


def _switch() -> Iterator[bool]:
    on = False
    while True:
        if select.select([sys.stdin], [], [], TICK_S)[0]:
            word = sys.stdin.readline().strip()
            if word in ("", "stop"):
                return
            on = word == "on"
        yield on


def _connect(held: list[socket.socket], address: str, words: bytes) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    made = socket.socket()
    made.settimeout(1.0)
    try:
        made.connect((host, int(port)))
        made.sendall(words)
    except OSError:
        made.close()
        return False
    held.append(made)
    if len(held) > NUM_HELD:
        held.pop(0).close()
    return True


def _send(made: zmq.Socket) -> bool:
    try:
        made.send_multipart([os.urandom(64)] * (2 if os.urandom(1) < b"\x80" else 1), zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _peers(control: str, data: str) -> dict[str, list[Any]]:
    """Sockets of ZeroMQ's own: some send garbage in valid frames (as far as a learner lets them), some try unknown keys."""
    context, found = zmq.Context.instance(), {"frames": [], "monitors": []}
    for kind, address in ((zmq.DEALER, control), (zmq.PUSH, data)):
        made = context.socket(kind)
        made.setsockopt(zmq.IMMEDIATE, 1)
        made.setsockopt(zmq.LINGER, 0)
        made.connect(address)
        found["frames"].append(made)
        for _ in range(2):
            guess = context.socket(kind)
            public, secret = zmq.curve_keypair()
            guess.setsockopt(zmq.CURVE_SERVERKEY, os.environ.get("LEARNER_KEY", public.decode()).encode())
            guess.setsockopt(zmq.CURVE_PUBLICKEY, public)
            guess.setsockopt(zmq.CURVE_SECRETKEY, secret)
            guess.setsockopt(zmq.RECONNECT_IVL, 100)
            guess.setsockopt(zmq.LINGER, 0)
            found["monitors"].append(guess.get_monitor_socket(zmq.EVENT_CONNECTED))
            guess.connect(address)
    return found


def _failures(monitor: zmq.Socket) -> int:
    count = 0
    while monitor.poll(0):
        monitor.recv_multipart()
        count += 1
    return count


if __name__ == "__main__":
    stranger(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
