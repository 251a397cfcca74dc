"""What a run shows: on the terminal, or in whatever file or pipe stands in for it.

Imports the standard library only. Invariant: a terminal that is closed, a pipe that nobody reads any more and a full disk
neither end a run nor change its exit code; what cannot be shown is in the logs of those who said it.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TextIO


def say(text: str) -> None:
    """The launcher's own words."""
    show(sys.stderr, f"async-rl: {text}\n".encode())


def show(stream: TextIO, data: bytes) -> None:
    """Whole lines. What a full disk does not take is tried again with the next ones."""
    try:
        stream.buffer.write(data)
        stream.buffer.flush()
    except OSError as e:
        if e.errno != errno.ENOSPC:
            _give_up(stream)


def release() -> None:
    """At the end: what could not be written by now must not be what this process ends with."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _give_up(stream)


def _give_up(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
