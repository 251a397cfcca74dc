"""`python -m tests.strangers KIND ADDRESS COUNT SECONDS`: somebody who means ill, in a process of his own.

Opens COUNT connections to ADDRESS as fast as it can, says on each what KIND says, and holds them for SECONDS.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
import time

from benchmarks.stranger import CURVE, NULL

SAYS = {
    "idle": b"",
    "half": CURVE,  # a greeting, and no handshake behind it
    "half_null": NULL,
    "random": os.urandom(256),
    "header": CURVE + b"\x06" + struct.pack(">Q", 1 << 40),  # where HELLO is due
    "large": CURVE + b"\x06" + struct.pack(">Q", 19_000) + bytes(18_000),  # all but the last of a frame of the size allowed
}


def main(kind: str, address: str, count: int, seconds: float) -> None:
    """Prints how many connections were made."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    held: list[socket.socket] = []
    until = time.monotonic() + seconds
    for _ in range(count):
        made = socket.socket()
        made.setblocking(False)
        made.connect_ex((host, int(port)))
        held.append(made)
        if len(held) % 16 == 0:
            time.sleep(0.001)
    silent = held
    while silent and time.monotonic() < until:
        silent = [made for made in silent if not _said(made, SAYS[kind])]
        time.sleep(0.01)
    time.sleep(max(0.0, until - time.monotonic()))
    print(count - len(silent), flush=True)


def _said(made: socket.socket, words: bytes) -> bool:
    """False while it is not connected."""
    try:
        made.send(words)
    except BlockingIOError:
        return False
    except OSError:
        pass  # it is refused already
    return True


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
