"""The terminal: one line per step, notices between them. Imports the standard library only.

Invariant: a step takes one line of at most WIDTH columns, whatever is missing from its row; a header repeats so that a
screen always shows one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TextIO

WIDTH = 120
HEADER_EVERY = 20  # lines
NOBODY_BELOW = 0.05  # share of a step's time: less is not worth a name

Row = Mapping[str, Any]


class Column(NamedTuple):
    title: str
    width: int
    text: Callable[[Row], str]


class Console:
    """Prints to `stream` (stdout by default); flushes each line, since stdout may be a pipe to the launcher."""

    def __init__(self, num_steps: int, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._lines_since_header = HEADER_EVERY
        self._columns = _columns(num_steps)

    def step(self, row: Row) -> None:
        if self._lines_since_header >= HEADER_EVERY:
            self._print("  ".join(c.title.rjust(c.width) for c in self._columns) + "  waits")
            self._lines_since_header = 0
        line = "  ".join(c.text(row).rjust(c.width) for c in self._columns)
        self._print(f"{line}  {who_waits(row)}")

    def notice(self, text: str) -> None:
        """An event between steps: an evaluation, a join, an expulsion, a checkpoint."""
        shown = "".join(c if c.isprintable() else " " for c in text)  # it may repeat what an answer or a peer said
        self._print(f"-- {' '.join(shown.split())}")

    def _print(self, line: str) -> None:
        stream = self._stream or sys.stdout
        # one write for text and newline: into a pipe, another process may write between two
        stream.write((line[:WIDTH] if not line.startswith("-- ") else line) + "\n")
        stream.flush()
        self._lines_since_header += 1


def who_waits(row: Row) -> str:
    """Who could not work during the step: the learner and for what, the rollouts, or nobody.

    The learner's waits are measured (`idle/X_s`). The rollouts wait when nothing is leased to them: what they have made is
    ready or in training, and the staleness bound admits no more.
    """
    step_s = _number(row, "time/step_s")
    waits = {
        key.removeprefix("idle/").removesuffix("_s"): _number(row, key)
        for key in row
        if key.startswith("idle/") and key not in ("idle/learner_s", "idle/rollout_s")
    }
    if waits and step_s > 0:
        what = max(waits, key=lambda name: waits[name])
        share = waits[what] / step_s
        if share >= NOBODY_BELOW:
            return f"learner {min(share, 1.0):.0%}: {what}"
    ledger = row.get("ledger")
    leased = ledger.get("leased") if isinstance(ledger, Mapping) else None
    return "rollouts" if leased == 0 else "-"


def _columns(num_steps: int) -> list[Column]:
    digits = len(str(num_steps))
    return [
        Column("step", 2 * digits + 1, lambda row: f"{row.get('step', '?')}/{num_steps}"),
        Column("ver", max(3, digits), lambda row: str(row.get("version", "?"))),
        Column("reward", 6, lambda row: _fixed(row, "reward/mean", 3)),
        Column("lag", 4, lambda row: _fixed(row, "lag/mean", 2)),
        Column("max", 3, lambda row: _fixed(row, "lag/max", 0)),
        Column("tok/s", 7, lambda row: _fixed(row, "rollout/tokens_per_s", 0)),
        Column("loss", 8, lambda row: _fixed(row, "loss", 4)),
        Column("|grad|", 7, lambda row: _short(row, "policy/grad_norm")),
        Column("entropy", 7, lambda row: _fixed(row, "policy/entropy", 3)),
        Column("len", 6, lambda row: _fixed(row, "len/mean", 1)),
        Column("s", 6, lambda row: _short(row, "time/step_s")),
    ]


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def _fixed(row: Row, key: str, digits: int) -> str:
    value = _number(row, key)
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _short(row: Row, key: str) -> str:
    value = _number(row, key)
    return f"{value:.3g}" if math.isfinite(value) else "-"
