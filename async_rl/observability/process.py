"""A process's cores, and its tie to the one that started it: when the parent is gone, so is the child, however it ended.

Imports the standard library only, and must be cheap: it is the first thing a learner rank or a rollout does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PARENT_PID = "ASYNC_RL_PARENT_PID"
"""Environment variable by which a starter says who it is; absent in processes started by hand, which outlive a shell."""

HOST_CORES = "ASYNC_RL_HOST_CORES"
"""Environment variable with the cores that the launcher may use, by commas; absent where it pins nobody to a share of them."""

EXIT_LOST_RANK = 6
"""Exit code of a learner rank that lost another one: the run goes on from its checkpoint, if there is one."""

LOST_RANK = "has lost rank"
"""What a learner rank says when another one has failed: never the cause, which the other one tells."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent_pid: int | None = None) -> None:
    """Have the kernel SIGKILL this process when the thread that started it ends; exits at once if it already has.

    `parent_pid` None takes the starter's word from the environment, and does nothing if there is none (a process
    started by hand). A process that starts helpers passes its own pid to them. No effect beyond Linux.
    """
    if parent_pid is None:
        parent_pid = int(os.environ.get(PARENT_PID) or 0)
    if not parent_pid or _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended between the fork and the call above: no signal will come
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that none escapes its sight (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def other_cores(only: bool = False) -> Iterator[None]:
    """Threads started within may run on every core of the host that the launcher may use, not on this process's share only;
    with `only` on no core of that share, where there are others.

    For those that serve sockets: they compute little, and on a core that computes all the time they would wait, or hold it up.
    One that needs the interpreter's lock must not wait for a core with it in hand: it may have any.
    """
    if not (cores := os.environ.get(HOST_CORES)):
        yield
        return
    own = os.sched_getaffinity(0)  # of this thread; those that it starts inherit it
    every = {int(core) for core in cores.split(",")}
    os.sched_setaffinity(0, (every - own if only else every) or every)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
