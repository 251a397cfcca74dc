"""Why a run ends early: an exit code and one sentence. Imports torch only."""

from __future__ import annotations

import sys
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

GRACE_S = 10.0  # the timeouts of ranks that wait for the same one do not end at once


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


def missing_ranks() -> list[int]:
    """After a collective failed: the other ranks that do not say within GRACE_S that it failed for them, too. Of two ranks that
    is the other one; one that is killed, frozen or stuck says nothing."""
    own, num_ranks = dist.get_rank(), dist.get_world_size()
    others = [rank for rank in range(num_ranks) if rank != own]
    if num_ranks == 2:
        return others
    said: set[int] = set()

    def call() -> None:  # the store may be in a process that is frozen itself
        store = _get_default_store()
        store.set(f"lost/{own}", "")
        while len(said) < len(others) - 1:
            said.update(rank for rank in others if store.check([f"lost/{rank}"]))
            time.sleep(0.1)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(GRACE_S)
    return [rank for rank in others if rank not in said]


def tell(sentence: str) -> None:
    """Say it on stderr, in one write: the log that a launcher makes of it has other writers."""
    try:
        sys.stderr.write(f"learner: {sentence}\n")
        sys.stderr.flush()
    except OSError:  # the disk of the log is full
        sys.stderr = None  # Python would fail to flush it at exit, and make the exit code 120
        print(f"-- failed: {sentence}", flush=True)
