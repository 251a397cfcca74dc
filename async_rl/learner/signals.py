"""Signals that end a run: a flag set in the handler, looked at between and within waits of the training thread.

Owns the handlers of the learner process. Invariant: once there is something to save a handler does nothing but remember;
before, it ends the process at once.
"""

from __future__ import annotations

import signal
from types import FrameType

from async_rl.learner.failure import RunStopped


class Stop:
    """SIGINT, SIGTERM and SIGUSR1 (preemption) ask for an orderly end; a second SIGINT ends at once."""

    def __init__(self) -> None:
        self.asked = 0
        self._nothing_to_save = True

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._remember)

    def remember(self) -> None:
        """From now on a signal waits until the training thread looks; raises RunStopped if one has come already."""
        self._nothing_to_save = False
        self.raise_if_asked()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = number
        if self._nothing_to_save:
            self.raise_if_asked()

    def raise_if_asked(self) -> None:
        if self.asked:
            raise RunStopped(128 + self.asked, f"stopped by {signal.Signals(self.asked).name}")
