"""Starting, hearing and ending the processes of a run.

Owns every child: each is the leader of a session of its own, dies with the launcher (by the kernel's hand, so also when
the launcher is killed), and is ended by process groups. Imports launcher.plan and observability only.
Invariant: after `end_all` no process that any child ever started is alive.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import IO

import psutil

from async_rl.launcher.plan import ProcessSpec
from async_rl.launcher.terminal import show
from async_rl.observability.process import LOST_RANK, PARENT_PID, die_with_parent

TAIL_BYTES = 64 << 10
LEAVE_S = 2.0  # a scorer looks for its parent every second
LOOK_S = 1.0  # between two looks at all processes
NUM_SEARCHED = 50  # lines of a log, for a sentence
MAX_WORDS = 200  # characters of it that a terminal gets
AFTERMATH = "Exception ignored in"  # of the interpreter's end
NOISE = re.compile(r"\s|Traceback |.*Warning: ")  # around a traceback's last line
ROUTINE = re.compile(
    r"(\S+ ){0,4}(DEBUG|INFO|WARNING)\b|\[?[IW]\d{3,4} |.*\d%\||-- "
)  # log lines that tell no error; progress bars; the learner's notices
CAUSE = re.compile(r"(?i).*(error|exception|fatal|abort|terminate|cannot|failed|fault|out of memory)")


class Child:
    """A started process and its log. With `piped` its stdout is a pipe for the caller to read, its stderr the log."""

    def __init__(self, spec: ProcessSpec, piped: bool = False) -> None:
        self.spec = spec
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        self.log: IO[bytes] = spec.log.open("ab", buffering=0)
        self._log_begin = self.log.seek(0, os.SEEK_END)  # before it: earlier lives of the same name
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
        """The last lines that this process has added to its log, without blank ones."""
        try:
            with self.spec.log.open("rb") as file:
                file.seek(max(self._log_begin, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:  # somebody has moved or removed it
            return []
        return list(deque((line.rstrip() for line in lines if line.strip()), maxlen=num_lines))

    def last_words(self) -> str:
        """What it said last that reads like a sentence, shortened; "" when it said nothing.

        Our processes close with "NAME: sentence". Others end in a traceback's last line, with warnings of libraries around it.
        Of one that a signal killed, what its log said last in the ordinary course of things is no cause and not told.
        """
        lines = list(takewhile(lambda line: not line.startswith(AFTERMATH), self.tail(NUM_SEARCHED)))
        mark = f"{self.spec.name}: "
        own = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
        causes = [line for line in own if LOST_RANK not in line]
        code = self.poll() or 0
        killed = code < 0 or code > 128
        others = [line for line in lines if not NOISE.match(line)]
        if killed:
            others = [line for line in others if CAUSE.match(line) and not ROUTINE.match(line)]
        words = (causes or own or others or [""])[-1]
        return words if len(words) <= MAX_WORDS else f"{words[: MAX_WORDS - 1]}…"

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


class Orphans:
    """What the launcher alone can see of processes below its children: torchrun that outlives its ranks, which its own exit
    code would never tell, and the dead that nobody else will bury."""

    def __init__(self) -> None:
        self._looked_s = -math.inf
        self._last_rank_s: float | None = None  # when the learner's last rank was seen alive

    def look(self, learner: Child, ours: Iterable[int]) -> float:
        """Once a second: bury the dead that this process has adopted (not `ours`: who started those asks for their exit codes);
        for how long the learner has been without ranks that it once had, in seconds."""
        now = time.monotonic()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            spared = set(ours)
            for process in psutil.Process().children():
                if process.pid not in spared and not _alive(process):
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(process.pid, os.WNOHANG)
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(_alive(rank) for rank in psutil.Process(learner.popen.pid).children()):
                    self._last_rank_s = now
        return 0.0 if self._last_rank_s is None else now - self._last_rank_s

    def forget(self) -> None:
        """The learner is another one now."""
        self._last_rank_s = None


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(children: Iterable[Child]) -> set[psutil.Process]:
    """The children that live, and all that they started."""
    found: set[psutil.Process] = set()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(child.popen.pid)
            found |= {leader, *leader.children(recursive=True)}
    return found


class Pipes:
    """What piped children print goes to their logs and to the terminal, in whole lines: others write there meanwhile."""

    def __init__(self) -> None:
        self._unfinished: dict[Child, bytes] = {}
        self._selector = selectors.DefaultSelector()

    def add(self, child: Child) -> None:
        assert child.popen.stdout is not None
        os.set_blocking(child.popen.stdout.fileno(), False)
        self._selector.register(child.popen.stdout, selectors.EVENT_READ, child)

    def pass_on(self, timeout_s: float) -> None:
        """Wait at most timeout_s for something to be printed, and pass it on."""
        for key, _ in self._selector.select(timeout_s):
            child = key.data
            while data := key.fileobj.read(1 << 16):  # type: ignore[union-attr]
                lines, newline, rest = (self._unfinished.pop(child, b"") + data).rpartition(b"\n")
                self._unfinished[child] = rest
                self._pass_on(child, lines + newline)
            if data == b"":
                self.drop(child)
        if not self._selector.get_map():
            time.sleep(timeout_s)

    def drop(self, child: Child) -> None:
        """Nothing more is wanted of it. Call it before its end of the pipe is closed: the number of that goes to the next."""
        if rest := self._unfinished.pop(child, b""):
            self._pass_on(child, rest + b"\n")
        pipe = child.popen.stdout
        if pipe is not None and pipe in self._selector.get_map():
            self._selector.unregister(pipe)

    def _pass_on(self, child: Child, data: bytes) -> None:
        show(sys.stdout, data)
        with contextlib.suppress(OSError):  # a full disk: the process whose words these are tells of it
            child.log.write(data)


def end_all(children: Iterable[Child], grace_s: float, bystanders: Iterable[int] = ()) -> None:
    """Ask every child to end (SIGTERM), and after grace_s kill what is left of them, orphans they left behind included.

    What a child has started ends by itself when the child is gone, some of it after tidying up (semaphores, a temporary
    folder); it has LEAVE_S for that. `bystanders` are pids of children this process had before the run; they are left alone.
    """
    children = list(children)
    relatives = family(children)
    for child in children:
        if child.poll() is None:
            child.signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    relatives |= family(children)
    for child in children:
        if child.poll() is None:
            child.popen.kill()
    relatives |= _adopted(bystanders)
    _await_end(relatives)
    for process in relatives:
        _kill_group(process)
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.popen.wait(timeout=5)
        child.close()
    psutil.wait_procs(_adopted(bystanders), timeout=5)


def _await_end(processes: Iterable[psutil.Process]) -> None:
    deadline = time.monotonic() + LEAVE_S
    while any(_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)


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
