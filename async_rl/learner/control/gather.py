"""Where the publisher asks for a bucket of weights and the trainer, at a boundary, hands it over.

Owns the handshake of the two threads and nothing else. Invariant: at most one bucket is asked for at a time; closing
frees whoever waits.
"""

from __future__ import annotations

import threading

import torch

from async_rl.observability.waiting import waiting
from async_rl.weights.base import WeightsError

POLL_S = 0.2


class GatherPort:
    """Guarded by rank 0's one lock, `changed`."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self.wanted: int | None = None
        self._bucket: torch.Tensor | None = None
        self.closed = False

    def fetch(self, k: int) -> torch.Tensor:
        """Publisher: bucket k, uint8. Waits for the trainer's next boundary; raises WeightsError once closed."""
        with waiting(f"the trainer to hand over bucket {k}"), self.changed:
            self.wanted, self._bucket = k, None
            self.changed.notify_all()
            while self._bucket is None:
                if self.closed:
                    raise WeightsError("the learner is closing")
                self.changed.wait(POLL_S)
            return self._bucket

    def put(self, bucket: torch.Tensor) -> None:
        """Trainer: the bucket that was wanted."""
        with self.changed:
            self.wanted, self._bucket = None, bucket
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
