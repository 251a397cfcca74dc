"""The processes in which rewards are computed: what they may take, and what ends with them.

Owns the limits of a scorer and the end of its process group; pebble owns the pool. Imports pebble and the standard library.
Invariant: whatever ends a scorer (its deadline, its memory, a signal, the pool), the programs that it has started end with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import threading
import time
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from pebble import ProcessPool

ORPHAN_CHECK_S = 1.0
OUT_OF_MEMORY = 88  # exit code of a scorer whose reward asked for more than it may have


class _Scorer(SpawnProcess):
    """Leads a process group. One that was killed, as it was stuck beyond the reach of a signal, cannot end its group itself."""

    _ended = False

    def is_alive(self) -> bool:
        """The pool asks for this until it is False, however the process ended."""
        alive = super().is_alive()
        if not alive and not self._ended and self.pid:
            self._ended = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return alive


class _Context(SpawnContext):
    Process = _Scorer


def new_pool(num_workers: int, memory_bytes: int) -> ProcessPool:
    """Spawned, never forked: sockets and threads exist by then (BR-101)."""
    context: Any = _Context()  # pebble's annotation names the fork context only
    return ProcessPool(num_workers, initializer=_start, initargs=(os.getpid(), memory_bytes), context=context)


def end_pool(pool: ProcessPool) -> None:
    """End a pool's scorers, whatever they do; returns within a few seconds."""
    pool.stop()
    pool.join()


def _start(parent: int, memory_bytes: int) -> None:
    """A scorer leads a process group, so that programs which a reward has started end with it: when it overstays, when the pool
    closes, and, by a thread, when its rollout is gone. What it prints is no result: it goes to stderr."""
    os.setsid()
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    # Not RLIMIT_AS: that counts every library, too, and whatever address space is reserved and never touched.
    for kind, limit in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_CHECK_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def end_if_out_of_memory(error: BaseException) -> None:
    """When that was memory it may not have, end this scorer, and a fresh one takes over: what it holds would fail the next."""
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or refused or "can't allocate memory" in str(error):  # as torch says it
        os._exit(OUT_OF_MEMORY)
