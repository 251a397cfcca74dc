"""The hang reporter: whoever waits says for what, and one thread of the process repeats it while the wait lasts.

Imports the standard library and the log. Invariant: a wait is reported every REPORT_EVERY_S from its start, whatever the
waiting thread, or the lock that its detail needs, is stuck in; the reporter itself never blocks for longer than DETAIL_S.
Several waits for the very same thing are one line.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from async_rl.observability.log import get_logger

REPORT_EVERY_S = 10.0
DETAIL_S = 1.0

log = get_logger(__name__)


@dataclass
class Waiting:
    """One wait in progress: for what, in which thread, since when (monotonic seconds; the clock time is for people)."""

    what: str
    detail: Callable[[], str] | None = None
    normal: bool = False  # may last: said at level info, and no alarm
    since: float = field(default_factory=time.monotonic)
    clock: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    due: float = 0.0

    def line(self, now: float, others: int = 0) -> str:
        more = f", and {others} more" if others else ""
        return f"waiting {now - self.since:.1f} s (since {self.clock}, in {self.thread}{more}) for {self.what}"


class Reporter:
    """Owns the waits in progress and the thread that reports them; there is one per process."""

    def __init__(self, every_s: float = REPORT_EVERY_S) -> None:
        self._every_s = every_s
        self._waits: dict[int, Waiting] = {}
        self._keys = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, what: str, detail: Callable[[], str] | None = None, *, normal: bool = False) -> Iterator[Waiting]:
        """While the block runs, report `what`, with what `detail()` says at the time. Nests; any thread, any coroutine."""
        wait = Waiting(what, detail, normal)
        wait.due = wait.since + self._every_s
        with self._changed:
            key = next(self._keys)
            self._waits[key] = wait
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)
                self._thread.start()
        try:
            yield wait
        finally:
            with self._changed:
                del self._waits[key]

    def current(self) -> list[Waiting]:
        """The waits in progress, oldest first."""
        with self._changed:
            return list(self._waits.values())

    def lines(self, older_than_s: float = 0.0) -> list[str]:
        """What is waited for now, oldest first, the very same thing once."""
        now, same = time.monotonic(), dict[str, list[Waiting]]()
        for wait in self.current():
            if now - wait.since >= older_than_s:
                same.setdefault(wait.what, []).append(wait)
        return [waits[0].line(now, len(waits) - 1) for waits in same.values()]

    def _run(self) -> None:
        # A wait always starts `every_s` before it is due, so sleeping that long, or to the next due time, misses none.
        while True:
            now = time.monotonic()
            due: dict[str, list[Waiting]] = {}
            for wait in self.current():
                if wait.due <= now:
                    wait.due += self._every_s
                    due.setdefault(wait.what, []).append(wait)
            for same in due.values():
                self._report(same, now)
            next_due = min((wait.due for wait in self.current()), default=time.monotonic() + self._every_s)
            time.sleep(max(0.01, next_due - time.monotonic()))

    def _report(self, same: list[Waiting], now: float) -> None:
        wait = same[0]
        detail = _bounded(wait.detail) if wait.detail else ""
        level = logging.INFO if wait.normal else logging.WARNING
        log.log(level, "%s%s", wait.line(now, len(same) - 1), f": {detail}" if detail else "")


def _bounded(detail: Callable[[], str]) -> str:
    """What `detail` says, or that it did not answer: the lock it needs may be the very thing that hangs."""
    answer: list[str] = []

    def ask() -> None:
        try:
            answer.append(detail())
        except Exception as e:
            answer.append(f"(no detail: {type(e).__name__}: {e})")

    thread = threading.Thread(target=ask, name="waiting-detail", daemon=True)
    thread.start()
    thread.join(DETAIL_S)
    return answer[0] if answer else f"(no detail within {DETAIL_S:.0f} s: is its lock held?)"


_reporter = Reporter()
waiting = _reporter.waiting
current = _reporter.current
lines = _reporter.lines
# A fork (an engine core) begins with no wait of its parent's, and with a lock that nobody holds.
os.register_at_fork(after_in_child=_reporter.__init__)
