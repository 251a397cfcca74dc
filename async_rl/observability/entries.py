"""A file of MessagePack entries, each with its length and its digest, that only grows.

Imports the standard library and msgpack. Invariants: what a kill cut short is told from what was damaged later; whatever the
bytes hold, reading gives whole entries or EntryError; no entry is lost without the writer knowing it.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from async_rl.observability.files import of_file

_HEAD, _CHECK = struct.Struct("<Q32s"), struct.Struct("<I")  # length and SHA-256 of the content; CRC-32 of the two
HEAD_BYTES = _HEAD.size + _CHECK.size


class EntryError(Exception):
    """A file that holds something else than whole entries before its last; one clause."""


class Entry(NamedTuple):
    content: dict[str, Any]
    end: int  # offset behind it


class EntryWriter:
    """Appends to a file after its first `size` bytes; what lies behind them goes. Raises OSError, which names the file.

    An entry that a full disk did not take whole is kept, and written before the next one.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
            if self._file.seek(0, os.SEEK_END) < size:
                raise OSError(f"it has {self._file.tell()} bytes, where {size} were written")
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as e:
            raise of_file(e, path) from None
        self.end = size  # of all entries given so far
        self._unwritten = b""

    def append(self, content: dict[str, Any]) -> None:
        packed: bytes = msgpack.packb(content)  # pyright: ignore[reportAssignmentType]
        head = _HEAD.pack(len(packed), hashlib.sha256(packed).digest())
        self._unwritten += head + _CHECK.pack(zlib.crc32(head)) + packed
        self.end += HEAD_BYTES + len(packed)
        self.flush()

    def flush(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as e:
            raise of_file(e, self.path) from None

    def sync(self) -> None:
        """Wait until the disk has what was written; from any thread."""
        try:
            os.fsync(self._file.fileno())
        except OSError as e:
            raise of_file(e, self.path) from None

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()


def read_entries(path: Path, start: int = 0) -> Iterator[Entry]:
    """The entries from offset `start` on, one in memory at a time; a last one that was cut short is left out.

    Raises OSError, or EntryError for one that is damaged before the end.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(start)
        at = start
        while size - at >= HEAD_BYTES:
            head, check = file.read(_HEAD.size), file.read(_CHECK.size)
            if zlib.crc32(head) != _CHECK.unpack(check)[0]:
                raise EntryError(f"the entry at byte {at} is damaged")
            length, digest = _HEAD.unpack(head)
            end = at + HEAD_BYTES + length
            if end > size:
                return
            packed = file.read(length)
            if hashlib.sha256(packed).digest() != digest:
                if end == size:  # a power cut may leave a last one of the right length without its content
                    return
                raise EntryError(f"the entry at byte {at} does not match its digest")
            yield Entry(_unpacked(packed, at), end)
            at = end


def _unpacked(packed: bytes, at: int) -> dict[str, Any]:
    try:
        content = msgpack.unpackb(packed, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as e:
        raise EntryError(f"the entry at byte {at} is no MessagePack ({e})") from None
    if not isinstance(content, dict):
        raise EntryError(f"the entry at byte {at} is no map")
    return content
