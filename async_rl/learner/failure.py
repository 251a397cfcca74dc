"""Why a run ends early: an exit code and one sentence. Imports torch only."""

from __future__ import annotations

import sys

import torch.distributed as dist


class RunFailed(Exception):
    """Ends the run; `code` becomes the exit code (3 rollouts gone, 4 training failed, 5 books do not balance)."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class RunStopped(Exception):
    """A signal asked for the end; `code` is 128 + signal number."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def lost_rank(error: Exception) -> bool:
    """Whether a collective of the learner's ranks failed, which is how the death of one shows on the others."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return several and isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo/" in str(error))


def tell(sentence: str) -> None:
    """Say it on stderr, in one write: the log that a launcher makes of it has other writers."""
    try:
        sys.stderr.write(f"learner: {sentence}\n")
        sys.stderr.flush()
    except OSError:  # the disk of the log is full
        sys.stderr = None  # Python would fail to flush it at exit, and make the exit code 120
        print(f"-- failed: {sentence}", flush=True)
