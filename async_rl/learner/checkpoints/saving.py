"""A rank's share of a checkpoint, written in a thread while training goes on.

Owns the thread and the copies it writes from. Invariant: what is written is the state at `begin`, whatever training does
meanwhile; at most one save is in progress, and its collectives run in a process group of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from async_rl.learner.checkpoints.checkpoint import Checkpointer, CheckpointError, rng_states
from async_rl.learner.control.membership import in_thread
from async_rl.observability.waiting import waiting


class Saving:
    """`checkpointer` has a group that nobody else uses while a save is in progress."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.checkpointer = checkpointer
        self._future: Future[Path] | None = None

    def begin(self, step: int, tensors: dict[str, Tensor], extra: bytes | None, first: Callable[[], None] | None) -> None:
        """Copy all of it, and write the copies in a thread, after `first` (rank 0 only; an OSError of it is a failed save)."""
        assert self._future is None, "the save before must have been finished"
        copies, rng = {name: host_copy(tensor) for name, tensor in tensors.items()}, rng_states()
        self._future = in_thread(self.checkpointer.save, step, copies, extra, rng, first)

    @property
    def done(self) -> bool:
        """Whether no save is in progress."""
        return self._future is None or self._future.done()

    def wait(self, timeout_s: float) -> bool:
        """For the save in progress to end; whether it has."""
        return self._future is None or bool(wait([self._future], timeout_s).done)

    def finish(self) -> None:
        """Wait for the save in progress, if there is one. Raises CheckpointError on all ranks alike, and what a lost rank makes
        of a collective."""
        future, self._future = self._future, None
        if future is not None:
            with waiting("the checkpoint in progress to be written by all ranks"):
                future.result()

    def follow(self) -> None:
        """The same on ranks other than 0, which leaves it to that one to say what a failed save means."""
        with contextlib.suppress(CheckpointError):
            self.finish()


def host_copy(tensor: Tensor) -> Tensor:
    """In host memory, of the same placement."""
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach().to("cpu", copy=True)
        return DTensor(local, tensor._spec, requires_grad=False)  # from_local would put it on the mesh's device
    return tensor.detach().to("cpu", copy=True)
