"""What is about to be broadcast: names, dtypes, shapes, ties and the cut into buckets, agreed before any byte moves.

Pure data, imports no torch. Invariant: the tensors lie one after another in one flat byte stream, each at an offset
that is a multiple of ALIGN_BYTES, and bucket k is the k-th slice of bucket_bytes of that stream. So both sides derive
the same cut from the same manifest, and a tensor larger than a bucket simply spans several.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from async_rl.weights.base import WeightsError

ALIGN_BYTES = 16  # torch reinterprets bytes as a wider dtype only at a multiple of that dtype's size
ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
MAX_TENSORS = 1 << 20
MAX_LISTED = 10


class TensorSpec(NamedTuple):
    """One tensor as it travels: Hugging Face name, torch dtype without "torch.", full (unsharded) shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Part(NamedTuple):
    """The piece of one tensor that lies in one bucket; offsets and size in bytes."""

    tensor: int  # index into Manifest.tensors
    tensor_offset: int
    bucket_offset: int
    num_bytes: int


class Bucket(NamedTuple):
    """One broadcast: bytes [start, end) of the stream, and the pieces of tensors in it."""

    index: int
    start: int
    end: int
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Manifest:
    """`ties` maps a name that is not sent to the name whose tensor it shares."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    ties: Mapping[str, str]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each tensor in the stream."""
        offsets, end = [], 0
        for spec in self.tensors:
            offsets.append(end)
            end += -(-spec.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return tuple(offsets)

    @property
    def num_bytes(self) -> int:
        """Length of the stream; alignment gaps (zeros) included."""
        return self.offsets[-1] + self.tensors[-1].num_bytes

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The cut of the stream; every byte is in exactly one bucket."""
        starts = range(0, self.num_bytes, self.bucket_bytes)
        parts: list[list[Part]] = [[] for _ in starts]
        for i, (offset, spec) in enumerate(zip(self.offsets, self.tensors, strict=True)):
            done = 0
            while done < spec.num_bytes:
                bucket, inside = divmod(offset + done, self.bucket_bytes)
                num_bytes = min(spec.num_bytes - done, self.bucket_bytes - inside)
                parts[bucket].append(Part(i, done, inside, num_bytes))
                done += num_bytes
        ends = [min(start + self.bucket_bytes, self.num_bytes) for start in starts]
        return tuple(Bucket(k, s, e, tuple(p)) for k, (s, e, p) in enumerate(zip(starts, ends, parts, strict=True)))

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical form, in hex."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the wire; `from_dict` reads it back."""
        return {
            "tensors": [[t.name, t.dtype, list(t.shape)] for t in self.tensors],
            "bucket_bytes": self.bucket_bytes,
            "ties": dict(self.ties),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Manifest:
        """Raises WeightsError, one sentence, on anything that `to_dict` could not have written."""
        try:
            tensors = tuple(_tensor_spec(entry) for entry in data["tensors"])
            manifest = cls(tensors, data["bucket_bytes"], dict(data["ties"]))
            _check(manifest)
        except (KeyError, TypeError, ValueError) as e:
            raise WeightsError(f"the weight manifest is malformed ({e!r}): run the same async_rl on both sides") from None
        return manifest

    def check_against(self, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Strict comparison with what a receiver holds, name -> (dtype, shape); raises WeightsError before a byte moves."""
        sent = {t.name: (t.dtype, t.shape) for t in self.tensors}
        differ = [name for name in sorted(sent.keys() & expected.keys()) if sent[name] != expected[name]]
        problems = [
            ("missing", sorted(expected.keys() - sent.keys())),
            ("unexpected", sorted(sent.keys() - expected.keys())),
            ("different", [f"{name} {_show(sent[name])} instead of {_show(expected[name])}" for name in differ]),
        ]
        found = [f"{kind}: {_listed(names)}" for kind, names in problems if names]
        if found:
            raise WeightsError(
                f"the learner's weights do not fit this engine ({'; '.join(found)}): start both from the same model and dtype"
            )


def _tensor_spec(entry: Any) -> TensorSpec:
    name, dtype, shape = entry
    if not isinstance(name, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} of dtype {dtype!r}")
    if not all(isinstance(n, int) and 0 <= n < 2**40 for n in shape):
        raise ValueError(f"shape {shape!r} of {name}")
    return TensorSpec(name, dtype, tuple(shape))


def _check(manifest: Manifest) -> None:
    names = [t.name for t in manifest.tensors]
    if not 1 <= len(names) <= MAX_TENSORS or len(set(names)) != len(names):
        raise ValueError(f"{len(names)} tensors, {len(set(names))} distinct names")
    if not isinstance(manifest.bucket_bytes, int) or manifest.bucket_bytes < 1 or manifest.bucket_bytes % ALIGN_BYTES:
        raise ValueError(f"bucket_bytes {manifest.bucket_bytes!r}, not a positive multiple of {ALIGN_BYTES}")
    if manifest.num_bytes == 0:
        raise ValueError("no bytes to send")
    for alias, name in manifest.ties.items():
        if alias in names or name not in names:
            raise ValueError(f"tie {alias!r} -> {name!r}")


def _show(spec: tuple[str, tuple[int, ...]]) -> str:
    return f"{spec[0]}{list(spec[1])}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
