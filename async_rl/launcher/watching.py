"""The launcher's own word, on the terminal and in its status file, and what it takes from those of others.

Imports observability only. Invariant: no thread, for the launcher forks; whoever has a loop calls `look` in every turn of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_rl.observability.status import EVERY_S, FOLDER, StatusFile, forget, read
from async_rl.observability.waiting import REPORT_EVERY_S


class Watch:
    def __init__(self, run_dir: Path, say: Callable[[str], None]) -> None:
        """Begin with an empty folder: what is in it is of processes of an earlier life."""
        forget(run_dir)
        self._run_dir, self._say = run_dir, say
        self._file = StatusFile(run_dir, "launcher")
        self._what = ""
        self._since_s = self._written_s = -EVERY_S
        self._tell_after_s = REPORT_EVERY_S
        self._words: list[dict[str, Any]] = []
        self._read_s = -EVERY_S
        self.look("")

    def look(self, what: str) -> None:
        """It waits for `what`, or for no more than its processes' ends. Told after REPORT_EVERY_S, and after twice as long."""
        now = time.monotonic()
        if what != self._what:
            self._what, self._since_s, self._tell_after_s = what, now, REPORT_EVERY_S
        waited_s = now - self._since_s
        if what and waited_s > self._tell_after_s:
            self._say(f"waiting for {self._tell_after_s:.0f} s for {what}")
            self._tell_after_s *= 2
        if now - self._written_s >= EVERY_S:
            self._written_s = now
            waits = [f"waiting {waited_s:.1f} s for {what}"] if what else []
            self._file.look = lambda: {"state": "watching", "waits": waits}
            self._file.write()

    def has_delivered(self, name: str, pid: int) -> bool:
        """Whether the rollout of that name and pid had delivered a group when it last said something of itself."""
        now = time.monotonic()
        if now - self._read_s >= EVERY_S:
            self._read_s, self._words = now, read(self._run_dir)
        return any(word["process"] == name and word["pid"] == pid and word.get("delivered", 0) > 0 for word in self._words)

    def others(self, own: set[tuple[str, int]]) -> list[str]:
        """The rollouts that serve the learner beside its own, of these names and pids, by what it last said."""
        members = [member for word in read(self._run_dir) for member in word.get("members", ())]
        return [member["id"] for member in members if (member["process"], member["pid"]) not in own and member["weights"]]

    def close(self) -> None:
        """The run is over: nothing is left to be looked at."""
        forget(self._run_dir)
        with contextlib.suppress(OSError):
            (self._run_dir / FOLDER).rmdir()
