"""Starting, hearing and ending the processes of a run.

Owns every child: each is the leader of a session of its own, dies with the launcher (by the kernel's hand, so also when
the launcher is killed), and is ended by process groups. Imports launcher.plan and observability only.
Invariant: after `end_all` no process that any child ever started is alive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable
from typing import IO

import psutil

from async_rl.launcher.plan import ProcessSpec
from async_rl.observability.process import PARENT_PID, die_with_parent

TAIL_BYTES = 64 << 10


class Child:
    """A started process and its log. With `piped` its stdout is a pipe for the caller to read, its stderr the log."""

    def __init__(self, spec: ProcessSpec, piped: bool = False) -> None:
        self.spec = spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        self.log: IO[bytes] = spec.log.open("ab", buffering=0)
        launcher, cores = os.getpid(), spec.cores

        def tie() -> None:  # between fork and exec: the launcher has no threads, so Python is safe here
            die_with_parent(launcher)
            if cores:
                os.sched_setaffinity(0, cores)

        self.popen = subprocess.Popen(
            spec.argv,
            env={**spec.env, PARENT_PID: str(launcher)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else self.log,
            stderr=self.log,
            start_new_session=True,
            preexec_fn=tie,  # noqa: PLW1509 (no threads here)
        )

    def poll(self) -> int | None:
        """The exit code once it has ended (negative: killed by that signal), else None."""
        return self.popen.poll()

    def tail(self, num_lines: int) -> list[str]:
        """The last lines of its log, without blank ones."""
        with self.spec.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return list(deque((line.rstrip() for line in lines if line.strip()), maxlen=num_lines))

    def signal(self, number: int, workers: bool = False) -> None:
        """Send it a signal; with `workers` to the processes it started (torchrun's ranks) instead, if there are any.

        torchrun would turn a signal of its own into SIGTERM, and into SIGKILL 30 s later, however long a checkpoint takes.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.popen.pid)
            for target in (workers and process.children()) or [process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    target.send_signal(number)

    def close(self) -> None:
        self.log.close()
        if self.popen.stdout:
            self.popen.stdout.close()


def family(children: Iterable[Child]) -> set[psutil.Process]:
    """The children that live, and all that they started."""
    found: set[psutil.Process] = set()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(child.popen.pid)
            found |= {leader, *leader.children(recursive=True)}
    return found


def end_all(children: Iterable[Child], grace_s: float, bystanders: Iterable[int] = ()) -> None:
    """Ask every child to end (SIGTERM), and after grace_s kill what is left of them, orphans they left behind included.

    `bystanders` are pids of children this process had before the run; they are left alone.
    """
    children = list(children)
    relatives = family(children)
    for child in children:
        if child.poll() is None:
            child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    relatives |= family(children) | _adopted(bystanders)
    for process in relatives:
        _kill_group(process)
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.popen.wait(timeout=5)
        child.close()
    psutil.wait_procs(_adopted(bystanders), timeout=5)


def own_children() -> set[int]:
    """Pids of the processes this one has now."""
    return {process.pid for process in psutil.Process().children()}


def _adopted(bystanders: Iterable[int]) -> set[psutil.Process]:
    spared = set(bystanders)
    return {
        p for child in psutil.Process().children() if child.pid not in spared for p in (child, *child.children(recursive=True))
    }


def _kill_group(process: psutil.Process) -> None:
    """SIGKILL the group it belongs to, unless that is our own."""
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        if not process.is_running():
            return
        group = os.getpgid(process.pid)
        if group == os.getpgid(0):
            process.kill()
        else:
            os.killpg(group, signal.SIGKILL)
