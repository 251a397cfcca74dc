"""Rank 0: when a checkpoint is begun, and what follows when it cannot be written.

Owns the version of the newest complete checkpoint and the count of failures in a row. Invariants: training waits for a copy of
the state in memory, never for a disk, unless an earlier checkpoint is still being written; how a save ended is known at a later
step boundary; a failed one is loud and harms nothing older, and only when it repeats does it end the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from async_rl.config.schema import CheckpointConfig
from async_rl.learner.checkpoints.best import Best
from async_rl.learner.checkpoints.checkpoint import CheckpointError
from async_rl.learner.commands import IDLE_S, Code
from async_rl.learner.failure import RunFailed
from async_rl.learner.rank import Rank
from async_rl.learner.report.progress import Progress
from async_rl.learner.report.recorder import Recorder
from async_rl.learner.update.gate import Gate
from async_rl.observability.waiting import waiting


class Saver:
    """`state` gives rank 0's part of the checkpoint of a version; `saved` is the version of the newest one, -1 without any."""

    def __init__(
        self,
        config: CheckpointConfig,
        rank: Rank,
        state: Callable[[int], bytes],
        best: Best,
        gate: Gate,
        progress: Progress,
        recorder: Recorder | None,
        saved: int,
    ) -> None:
        self.config, self.rank, self.best, self.gate, self.progress = config, rank, best, gate, progress
        self._state, self._recorder = state, recorder
        self.saved = saved
        self.failed = 0  # in a row
        self._writing = -1  # version of the one in progress

    @property
    def newest(self) -> int:
        """The version of the newest one, be it complete or in progress."""
        return max(self.saved, self._writing)

    def ready(self) -> bool:
        """Whether none is in progress, or it has ended and `look` has not been called since."""
        return self._writing < 0 or self.rank.saving.done

    def begin(self, version: int) -> None:
        """Of the current version, unless there is one; call it when `ready`. Raises RunFailed when too many in a row failed."""
        self.look()
        if self.saved == version:
            return
        started = time.monotonic()
        self.rank.checkpointer.spared = self.best.spared | self.gate.spared
        try:
            if self._recorder is not None:
                self._recorder.flush()
        except OSError as e:
            self._tell(version, f"the record cannot be written ({e.filename}: {e.strerror})")
            return
        state = self._state(version)
        self.rank.commands.issue(Code.SAVE, version)
        # what a checkpoint says of the record must be there after a power cut, too
        self.rank.save(version, state, self._recorder.sync if self._recorder else None)
        self._writing = version
        self.gate.saved(version)
        self.progress.waited("save", time.monotonic() - started)

    def look(self) -> None:
        """What came of the one in progress, if it has ended. Raises RunFailed when too many in a row failed."""
        if self._writing < 0 or not self.rank.saving.done:
            return
        version, self._writing = self._writing, -1
        try:
            self.rank.saving.finish()
        except CheckpointError as e:
            self.gate.lost(version)
            self.best.written(version, False)
            self._tell(version, str(e))
        else:
            self.failed, self.saved = 0, version
            self.best.written(version, True)

    def finish(self) -> None:
        """Wait for the one in progress; meanwhile the other ranks are told that this one lives."""
        told = time.monotonic()
        with waiting(f"the checkpoint of version {self._writing} to be written by all ranks"):
            while not self.rank.saving.wait(0.1):
                if time.monotonic() - told > IDLE_S:
                    told = time.monotonic()
                    self.rank.commands.issue(Code.IDLE)
        self.look()

    def close(self) -> None:
        """The same at the end of a run that has its reason already."""
        with contextlib.suppress(RunFailed):  # it was told
            self.finish()

    def _tell(self, version: int, why: str) -> None:
        self.failed += 1
        self.progress.notice(f"checkpoint of version {version} failed ({self.failed} in a row): {why}")
        if self.failed >= self.config.max_failed_saves:
            raise RunFailed(4, f"{self.failed} checkpoints in a row failed (checkpoint.max_failed_saves), the last: {why}")
