"""Signals that end a run: a flag set in the handler, looked at between and within waits of the training thread.

Owns the handlers of the learner process. Invariant: once there is something to save a handler does nothing but remember;
before, it ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType

from async_rl.learner.failure import RunStopped

PASS_ON_AFTER_S = 1.0  # a signal to all ranks is rank 0's own by then, and no second one


class Stop:
    """SIGINT, SIGTERM and SIGUSR1 (preemption) ask for an orderly end; a second SIGINT ends at once."""

    def __init__(self) -> None:
        self.asked = 0
        self._nothing_to_save = True
        self._leader = 0

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._remember)

    def remember(self) -> None:
        """From now on a signal waits until the training thread looks; raises RunStopped if one has come already."""
        self._nothing_to_save = False
        self.raise_if_asked()

    def follow(self, leader: int) -> None:
        """On ranks other than 0, which decide nothing: a signal that reaches this rank alone is for rank 0, of that pid."""
        self._leader = leader
        self.remember()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._leader:
            threading.Timer(PASS_ON_AFTER_S, self._pass_on, [number]).start()
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = self.asked or number
        if self._nothing_to_save:
            self.raise_if_asked()

    def _pass_on(self, number: int) -> None:
        """But for SIGINT, of which a second one ends at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._leader, signal.SIGTERM if number == signal.SIGINT else number)

    def raise_if_asked(self) -> None:
        if self.asked:
            raise RunStopped(128 + self.asked, f"stopped by {signal.Signals(self.asked).name}")
