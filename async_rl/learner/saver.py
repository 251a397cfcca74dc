"""Rank 0: when a checkpoint is written, and what follows when it cannot be.

Owns the version of the newest checkpoint and the count of failures in a row. Invariant: a failed save is loud and harms nothing
older; only when it repeats does it end the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from async_rl.config.schema import CheckpointConfig
from async_rl.learner.best import Best
from async_rl.learner.checkpoint import CheckpointError
from async_rl.learner.commands import Code
from async_rl.learner.failure import RunFailed
from async_rl.learner.gate import Gate
from async_rl.learner.progress import Progress
from async_rl.learner.rank import Rank
from async_rl.learner.recorder import Recorder


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

    def save(self, version: int) -> None:
        """A checkpoint of the current version, unless there is one. Raises RunFailed when too many in a row failed."""
        if self.saved == version:
            return
        started = time.monotonic()
        self.rank.checkpointer.spared = self.best.spared | self.gate.spared
        try:
            if self._recorder is not None:  # what a checkpoint says of the record must be there after a power cut, too
                self._recorder.flush()
                self._recorder.sync()
        except OSError as e:
            self._tell(version, f"the record cannot be written ({e.filename}: {e.strerror})")
            return
        state = self._state(version)
        self.rank.commands.issue(Code.SAVE, version)
        try:
            self.rank.save(version, state)
        except CheckpointError as e:
            self._tell(version, str(e))
            return
        self.failed, self.saved = 0, version
        self.gate.saved(version)
        self.progress.waited("save", time.monotonic() - started)

    def _tell(self, version: int, why: str) -> None:
        self.failed += 1
        self.progress.notice(f"checkpoint of version {version} failed ({self.failed} in a row): {why}")
        if self.failed >= self.config.max_failed_saves:
            raise RunFailed(4, f"{self.failed} checkpoints in a row failed (checkpoint.max_failed_saves), the last: {why}")
