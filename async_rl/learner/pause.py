"""A pause of training by the KL gate: what the runaway policy has sampled goes, and somebody may have to be asked.

Owns the file `continue` in the run's folder, by which a person says that training goes on. Invariant: no wait here is
without an end: leases have deadlines, and a person has `gate_timeout_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from async_rl.config.algorithm import KLConfig
from async_rl.learner.control.plane import ControlPlane
from async_rl.learner.update.gate import MAX_ACTIONS, Gate

CONTINUE = "continue"


class Wait(Protocol):
    """Until `ready`, called under the lock, is true; for `what`."""

    def __call__(self, ready: Callable[[], bool], what: str) -> bool: ...


class Pause:
    def __init__(self, config: KLConfig, gate: Gate, control: ControlPlane, run_dir: Path, wait: Wait) -> None:
        self.config, self.gate, self.control, self._wait = config, gate, control, wait
        self._marker = run_dir / CONTINUE

    def notice(self, version: int) -> str:
        """What has happened, what is done about it, and how to go on."""
        c = self.config
        what = f"gate_action={c.gate_action}, {self.gate.num_actions + 1} of {MAX_ACTIONS}, follows when nothing is in flight"
        if c.gate_action == "wait":
            what = f"`touch {self._marker}` goes on; in {c.gate_timeout_s:g} s (gate_timeout_s) the run is saved and ends"
        return f"training is paused at version {version}: {self.gate.why()}; {what}"

    def forget(self) -> None:
        """Whoever said "continue" before this pause did not mean it."""
        self._marker.unlink(missing_ok=True)

    def drain(self) -> int:
        """No new lease; what is ready is dropped, and so is what was in flight when it comes. Returns how many groups."""
        with self.control.changed:
            self.control.admitting = False
        num_dropped = 0

        def nothing_left() -> bool:
            nonlocal num_dropped
            ledger = self.control.ledger
            num_dropped += len(ids := ledger.unleased)
            ledger.drop(ids, "skipped")
            return ledger.oldest_lease(time.monotonic()) is None

        self._wait(nothing_left, "the groups in flight, which the paused policy sampled")
        return num_dropped

    def asked(self) -> bool:
        """Whether a person says within the time that training goes on."""
        if self.control.replayed:  # it did go on
            return True
        deadline_s = time.monotonic() + self.config.gate_timeout_s
        answered = self._marker.exists
        self._wait(lambda: answered() or time.monotonic() > deadline_s, f"`touch {self._marker}`, or the end of gate_timeout_s")
        said = answered()
        self.forget()
        return said

    def end(self) -> None:
        """Leases again."""
        with self.control.changed:
            self.control.admitting = True
