"""Where metric rows go: `metrics.jsonl` and `timing.jsonl`, which are the source of truth, and TensorBoard beside them.

A row is a flat mapping with a `step`; values are numbers, strings, lists or mappings of them. Imports numpy; tensorboard
inside its sink. Invariant: after a resume from step k no row of a later step is left from the life before.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from async_rl.observability.console import Console
from async_rl.observability.files import of_file, replace_file
from async_rl.observability.log import get_logger

__all__ = ["Console", "JsonlSink", "Row", "RunSink", "Sink", "TensorBoardSink", "read_rows", "read_run", "scalars"]

Row = Mapping[str, Any]
METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
# Keys, or beginnings of keys, whose values depend on the clock: the same run has others each time.
CLOCK = ("time_s", "time/", "idle/", "publish/", "events/", "rollout/", "samples_per_s", "eval/seconds", "ledger")
log = get_logger(__name__)


class Sink(Protocol):
    """Takes rows, in order, from one thread at a time."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends one JSON object per row, readable at once by others.

    `resume_step` None starts the file anew; otherwise rows up to that step stay, and later ones, of a life whose work was
    lost, go. Raises OSError, which names the file, when it cannot be written; a row that could not be is kept, and written
    before the next one.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else [row for row in read_rows(path) if _step(row) <= resume_step]
        replace_file(path, "".join(_line(row) for row in kept).encode())
        self._path = path
        self._file = path.open("ab", buffering=0)  # what a full disk took and what it did not must be known to the byte
        self._unwritten = b""

    def add(self, row: Row) -> None:
        """To be written by the next `flush`."""
        self._unwritten += _line(row).encode()

    def flush(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as e:
            raise of_file(e, self._path) from None

    def write(self, row: Row) -> None:
        self.add(row)
        self.flush()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()


class RunSink:
    """A run's rows in two files: `metrics.jsonl` holds what was learned, which a synchronous run with the same seed writes
    again byte for byte, and `timing.jsonl` what depends on the clock."""

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        self._metrics = JsonlSink(run_dir / METRICS, resume_step)
        self._timing = JsonlSink(run_dir / TIMING, resume_step)

    def write(self, row: Row) -> None:
        timing = {k: v for k, v in row.items() if k.startswith(CLOCK)}
        self._metrics.add({k: v for k, v in row.items() if k not in timing})
        self._timing.add({"step": row.get("step", 0), "of": _kind(row), **timing})
        try:
            self._metrics.flush()
        finally:
            self._timing.flush()

    def close(self) -> None:
        try:
            self._metrics.close()
        finally:
            self._timing.close()


class TensorBoardSink:
    """Writes every number of a row as a scalar at the row's step; list entries become `name/0`, `name/1`, ...

    Into a folder that already has events, the first row tells TensorBoard to forget theirs from its step on.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2  # the native writer needs neither torch nor tensorflow
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        events, summaries = cast(Any, event_pb2), cast(Any, summary_pb2)  # generated classes, unknown to type checkers
        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._summary, self._session = events.Event, summaries.Summary, events.SessionLog
        self._continues = any(folder.iterdir())
        self._writer = EventFileWriter(str(folder))

    def write(self, row: Row) -> None:
        step = int(row.get("step", 0))
        if self._continues:
            restart = self._session(status=self._session.START)
            self._writer.add_event(self._event(step=step, wall_time=time.time(), session_log=restart))
            self._continues = False
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars("", row) if tag != "step"]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics file; [] without one. A line cut short by a kill is left out, and logged."""
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip():
            log.warning("%s line %d is not a JSON object (cut short by a kill?): left out", path, number)
    return rows


def read_run(run_dir: Path) -> list[dict[str, Any]]:
    """All rows of a run as they were written, from both files; a row whose other half a kill has cut off stays without it."""
    halves: dict[tuple[str, Any], deque[dict[str, Any]]] = defaultdict(deque)
    for row in read_rows(run_dir / TIMING):
        halves[row.pop("of", ""), row.get("step")].append(row)
    rows = read_rows(run_dir / METRICS)
    for row in rows:
        other = halves[_kind(row), row.get("step")]
        row |= other.popleft() if other else {}
    return rows


def _step(row: Row) -> int:
    step = row.get("step", 0)
    return step if isinstance(step, int) else 0


def _kind(row: Row) -> str:
    return "step" if "reward/mean" in row else "eval"


def _line(row: Row) -> str:
    return json.dumps(_plain(row), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """What strict JSON can say: numpy becomes Python, NaN and infinity become null, anything odd its text."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value)


def scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Every number in a row, under its path: list entries become `name/0`, `name/1`, ..."""
    value = _plain(value) if not name else value
    if isinstance(value, dict):
        for key, part in value.items():
            yield from scalars(f"{name}/{key}" if name else key, part)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from scalars(f"{name}/{i}", part)
    elif isinstance(value, int | float):
        yield name, float(value)
