"""The record of a run: every batch exactly as a step took it, in `record/batches` of the run folder, for a replay.

Owns what is in an entry. Invariants: a checkpoint knows where in the record it stands, and its record is on
the disk before it is complete; what a lost timeline had recorded is cut off; a batch that could not be written is told,
counted, and written before the next one, or the run ends.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.config import Config
from async_rl.data.record import Record, pack_record, unpack_record
from async_rl.envs.text import tokenizer_digest
from async_rl.learner import LearnerError
from async_rl.learner.failure import RunFailed
from async_rl.observability.entries import EntryError, EntryWriter, read_entries
from async_rl.transport.codec import BadMessage, decode_group, encode_group, plain

RECORD, BATCHES = "record", "batches"
FORMAT = 1
DIGESTED_BYTES = 1 << 20  # of each end of a file of weights


class Life(NamedTuple):
    """One life of the recorded learner."""

    incarnation: int
    version: int  # it began with
    run_id: str
    config: dict[str, Any]
    model: str  # digest of the weights it started from; "" of a model that is no folder
    tokenizer: str
    end: int = 0  # offset behind it in the record


LIFE = Life._fields[:-1]


class Recorded(NamedTuple):
    """What one step took."""

    version: int  # of the learner
    incarnation: int
    records: list[Record]
    end: int  # offset behind it in the record


class Recorder:
    """Writes on after the first `position` bytes: 0 for a new run, or what the checkpoint says. Raises LearnerError."""

    def __init__(
        self, run_dir: Path, position: int, life: Life, max_failed: int, events: Counter[str], notice: Callable[[str], None]
    ) -> None:
        self._incarnation, self._max_failed, self._events, self._notice = life.incarnation, max_failed, events, notice
        self._failed = 0  # batches in a row that could not be written
        path = run_dir / RECORD / BATCHES
        try:
            self._file = EntryWriter(path, position)
            self._file.append({"kind": "life", "format": FORMAT, **{name: getattr(life, name) for name in LIFE}})
        except OSError as e:
            raise LearnerError(
                f"the record {path} cannot be written on ({e.strerror}): restore it, free space, or go on with record=false"
            ) from None

    @property
    def position(self) -> int:
        """Bytes of all that has been recorded, for a checkpoint."""
        return self._file.end

    def batch(self, version: int, records: list[Record]) -> None:
        """Raises RunFailed when too many in a row could not be written."""
        entry = {
            "kind": "batch",
            "version": version,
            "incarnation": self._incarnation,
            "records": [pack_record(record, encode_group) for record in records],
        }
        try:
            self._file.append(entry)
        except OSError as e:
            self._failed += 1
            self._events["record_failed"] += 1
            trouble = f"{e.filename}: {e.strerror}"
        else:
            self._failed = 0
            return
        self._notice(
            f"the batch of version {version} could not be recorded ({self._failed} in a row), and is tried again with the "
            f"next: {trouble}"
        )
        if self._failed >= self._max_failed:
            raise RunFailed(
                4,
                f"{self._failed} batches in a row could not be recorded (checkpoint.max_failed_saves), the last to {trouble}; "
                "free space on its disk and start again",
            )

    def flush(self) -> None:
        """Raises OSError while something is not written."""
        self._file.flush()

    def sync(self) -> None:
        """Wait until the disk has all that was flushed; from any thread. Raises OSError."""
        self._file.sync()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as e:
            self._notice(f"the end of the record could not be written: {e.filename}: {e.strerror}")


def life_of(config: Config, run_id: str, incarnation: int, version: int) -> Life:
    """What a replay must know of this life of the learner."""
    held = plain(config.model_dump(mode="json"))
    return Life(incarnation, version, run_id, held, model_digest(config.model.path), tokenizer_digest(config.model))


def model_digest(path: str) -> str:
    """16 hex digits over the configuration of a model folder and both ends of each of its files of weights; "" for a name."""
    folder, sha = Path(path), hashlib.sha256()
    if not folder.is_dir():
        return ""
    for file in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        with file.open("rb") as f:
            size = file.stat().st_size
            sha.update(f"{file.name} {size}".encode() + f.read(DIGESTED_BYTES))
            f.seek(max(0, size - DIGESTED_BYTES))
            sha.update(f.read(DIGESTED_BYTES))
    return sha.hexdigest()[:16]


def cut_record(run_dir: Path, position: int) -> None:
    """The run goes on without a record: what lies behind `position` is of a lost timeline. Raises LearnerError."""
    path = run_dir / RECORD / BATCHES
    try:
        EntryWriter(path, position).close()
    except OSError as e:
        raise LearnerError(f"the record {path} cannot be cut where the run goes on without one ({e.strerror})") from None


def read_record(path: Path, start: int = 0) -> Iterator[Life | Recorded]:
    """What was recorded, from offset `start` on. Raises LearnerError when it cannot be read."""
    try:
        for content, end in read_entries(path, start):
            if content["kind"] == "life":
                if content["format"] != FORMAT:
                    raise EntryError(f"it has format {content['format']}, where {FORMAT} is read")
                yield Life(**{name: content[name] for name in LIFE}, end=end)
            else:
                records = [unpack_record(data, decode_group) for data in content["records"]]
                yield Recorded(content["version"], content["incarnation"], records, end)
    except OSError as e:
        raise LearnerError(f"the record {path} cannot be read ({e.strerror or e}): give the folder of a run with one") from None
    except (EntryError, BadMessage, ValueError, LookupError, TypeError) as e:
        raise LearnerError(f"the record {path} cannot be read ({type(e).__name__}: {e}): restore it, or record anew") from None
