"""The hang reporter: whoever waits says for what, and one thread of the process repeats it while the wait lasts.

Imports the standard library and the log. Invariant: a wait is reported every REPORT_EVERY_S from its start, whatever the
waiting thread, or the lock that its detail needs, is stuck in; the reporter itself never blocks for longer than DETAIL_S.
"""

from __future__ import annotations

import itertools
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
    since: float = field(default_factory=time.monotonic)
    clock: str = field(default_factory=lambda: time.strftime("%H:%M:%S"))
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    due: float = 0.0

    def line(self, now: float) -> str:
        return f"waiting {now - self.since:.1f} s (since {self.clock}, in {self.thread}) for {self.what}"


class Reporter:
    """Owns the waits in progress and the thread that reports them; there is one per process."""

    def __init__(self, every_s: float = REPORT_EVERY_S) -> None:
        self._every_s = every_s
        self._waits: dict[int, Waiting] = {}
        self._keys = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextmanager
    def waiting(self, what: str, detail: Callable[[], str] | None = None) -> Iterator[Waiting]:
        """While the block runs, report `what`, with what `detail()` says at the time. Nests; any thread."""
        wait = Waiting(what, detail)
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

    def _run(self) -> None:
        # A wait always starts `every_s` before it is due, so sleeping that long, or to the next due time, misses none.
        while True:
            now = time.monotonic()
            for wait in self.current():
                if wait.due <= now:
                    wait.due += self._every_s
                    self._report(wait, now)
            next_due = min((wait.due for wait in self.current()), default=time.monotonic() + self._every_s)
            time.sleep(max(0.01, next_due - time.monotonic()))

    def _report(self, wait: Waiting, now: float) -> None:
        detail = _bounded(wait.detail) if wait.detail else ""
        log.warning("%s%s", wait.line(now), f": {detail}" if detail else "")


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
