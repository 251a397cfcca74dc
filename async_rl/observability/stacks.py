"""The stacks of all threads, in a process's own log: asked for by SIGUSR2, or written when a deadline has passed.

Imports the standard library and the log. Invariants: at most one set of stacks every EVERY_S, however many deadlines pass at
once; a process that does not catch SIGUSR2 is never sent it, for it would die of it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

from async_rl.observability import waiting
from async_rl.observability.log import get_logger

EVERY_S = 30.0
SIGNAL = signal.SIGUSR2

log = get_logger(__name__)
_lock = threading.Lock()
_file: int | None = None  # descriptor, for as long as the process lives: the handler writes there
_path = Path()
_last_s = 0.0


def register(path: Path) -> None:
    """From now on SIGUSR2 appends the stacks to this file, in this process and in what it forks (an engine core). A folder
    that cannot be written leaves things as they are."""
    global _file, _path
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _path = path
        faulthandler.register(SIGNAL, file=_file, all_threads=True, chain=False)


def dump(why: str, *pids: int | None) -> None:
    """Write this process's waits and stacks, and have those of the other processes `pids` written by themselves."""
    global _last_s
    with _lock:
        now = time.monotonic()
        if _file is None or (_last_s and now - _last_s < EVERY_S):
            return
        _last_s = now
    waits = "; ".join(waiting.lines()) or "no wait is known"
    log.warning("%s; %s; the stacks of all threads of process %d are in %s", why, waits, os.getpid(), _path)
    with contextlib.suppress(OSError):
        faulthandler.dump_traceback(_file, all_threads=True)
    for pid in pids:
        if pid:
            log.warning("%s: process %d is asked for its stacks", why, pid)
            ask(pid)


def ask(pid: int) -> bool:
    """Have a process of this host write its stacks into its log; a stopped one does when it goes on. False when it cannot."""
    if not _catches(pid):
        return False
    with contextlib.suppress(OSError):
        os.kill(pid, SIGNAL)
        return True
    return False


def _catches(pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = int(next(line for line in lines if line.startswith("SigCgt:")).split()[1], 16)
        return bool(caught >> (SIGNAL - 1) & 1)
    return False
