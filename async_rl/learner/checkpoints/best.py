"""Which checkpoint scored best on the held-out prompts.

Owns the file `checkpoints/best` and says what pruning must spare; rank 0 only. Invariants: the file names a checkpoint of the
surviving timeline that was complete when it was named; a file that cannot be read or written is a notice, never the end
of a run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from async_rl.learner.checkpoints.checkpoint import CheckpointError, step_folder
from async_rl.observability.files import replace_file

FILE = "best"


class Score(NamedTuple):
    """A checkpoint's version and its held-out accuracy."""

    version: int
    accuracy: float


class _Verdict(NamedTuple):
    accuracy: float | None


class Best:
    """`resumed` is the version this life of the learner began with; None means a new run, which has no best."""

    def __init__(self, directory: Path, resumed: int | None, notice: Callable[[str], None]) -> None:
        self.directory, self._notice = directory, notice
        self.score: Score | None = None
        self._candidate: int | None = None  # the version under evaluation, if it has a checkpoint
        self._complete = True  # the checkpoint
        self._verdict: _Verdict | None = None  # that came before it was
        self._recall(resumed)

    @property
    def spared(self) -> set[int]:
        """The versions whose checkpoints must stay: the best, and the one that may become it."""
        versions = (self.score.version if self.score else None, self._candidate)
        return {version for version in versions if version is not None}

    def begin(self, version: int, complete: bool = True) -> None:
        """This version is being evaluated and has a checkpoint, which may still be in progress: then `written` follows."""
        self._candidate, self._complete, self._verdict = version, complete, None

    def written(self, version: int, whole: bool) -> None:
        """The checkpoint of this version is complete now, or never will be."""
        if version != self._candidate or self._complete:
            return
        self._complete, verdict = True, self._verdict
        if not whole:
            self._candidate = None
        elif verdict is not None:
            self.judge(version, verdict.accuracy)

    def judge(self, version: int, accuracy: float | None) -> None:
        """Its evaluation is over; None: it does not count. A tie goes to the newer: it needs no folder beside the newest."""
        if version != self._candidate:
            return
        if not self._complete:
            self._verdict = _Verdict(accuracy)
            return
        self._candidate = None
        if accuracy is None or (self.score and accuracy < self.score.accuracy):
            return
        try:
            replace_file(self.directory / FILE, json.dumps({"step": version, "accuracy": accuracy}).encode() + b"\n")
        except OSError as e:
            self._notice(
                f"{self.directory / FILE} could not be written ({e.strerror}): version {version} does not count as best"
            )
            return
        self.score = Score(version, accuracy)

    def _recall(self, resumed: int | None) -> None:
        try:
            score = read_best(self.directory)
        except CheckpointError as e:
            self._notice(f"{e}; the best score is looked for anew")
            return
        if score is None:
            return
        if resumed is not None and score.version <= resumed:
            self.score = score
            return
        (self.directory / FILE).unlink(missing_ok=True)
        whence = "begins anew" if resumed is None else f"goes on from version {resumed}"
        self._notice(f"the best checkpoint, of version {score.version}, is forgotten: the run {whence}")


def read_best(directory: Path) -> Score | None:
    """What `best` names; None without that file. Raises CheckpointError when it is damaged or its checkpoint is gone."""
    path = directory / FILE
    try:
        said = json.loads(path.read_bytes())
        score = Score(int(said["step"]), float(said["accuracy"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{path} cannot be read ({type(e).__name__}: {e})") from None
    if not math.isfinite(score.accuracy) or not step_folder(directory, score.version).is_dir():
        raise CheckpointError(f"{path} names step {score.version} with accuracy {score.accuracy:g}, which is not there")
    return score
