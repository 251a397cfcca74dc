"""How often a process that died is started again: as long as its lives are of use.

Pure. Invariant: MAX_FRUITLESS + 1 lives in a row that came to nothing are the end, so a crash loop ends; nothing else does.
"""

from __future__ import annotations

MAX_FRUITLESS = 3


class Restarts:
    def __init__(self) -> None:
        self.count = 0
        self._fruitless = 0  # lives in a row

    def allow(self, fruitful: bool) -> bool:
        """A life has ended, which was of use or not: whether another may begin."""
        self._fruitless = 0 if fruitful else self._fruitless + 1
        if self._fruitless > MAX_FRUITLESS:
            return False
        self.count += 1
        return True

    def __str__(self) -> str:
        return f"restart {self.count}" + f", {self._fruitless} of {MAX_FRUITLESS} in a row without progress" * bool(
            self._fruitless
        )
