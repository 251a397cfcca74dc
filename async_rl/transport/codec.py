"""How the wire is written: control messages as one MessagePack map, groups as a header and raw array frames.

Owns the byte formats and their limits; imports messages, types, msgpack, numpy and pydantic, no socket. Invariants: whatever
bytes arrive, `decode` and `decode_group` return a valid object or raise BadMessage, nothing else; the arrays of a decoded
group are read-only views of the frames they came in (no copy). Whether log-probs are sane is the learner's business.

A group on the wire: frame 0 is the header, frames 1.. are `ARRAYS` in that order, little-endian, the siblings' tokens
end to end. Shape legend: P prompt tokens, T response tokens of one sibling, R response tokens of all siblings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import msgpack
import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from async_rl.transport.declared import declared_entries
from async_rl.transport.messages import MESSAGE, PROTOCOL, AnyMessage, Count, Message
from async_rl.types import MAX_REWARD, MAX_SCORE_NAME_BYTES, MAX_SCORES, Attempt, FinishReason, Group, Split, Trajectory

CONTROL_MAX_BYTES = 16 << 20  # one control message: a prompt of a million tokens, or a manifest of ten thousand tensors
MAX_SIBLINGS = 65536
MAX_ERROR_BYTES = 384  # with its reward, finish reason and scores a sibling stays under the header bytes the config allows
MAX_DEPTH = 16  # of nested values in Lease.fields

Frame = bytes | memoryview  # of bytes: len() is what it takes on the wire

_I4, _F4, _U1 = np.dtype("<i4"), np.dtype("<f4"), np.dtype("u1")
ARRAYS: tuple[tuple[str, np.dtype[Any]], ...] = (
    ("prompt_ids", _I4),  # [P]; all others [R]
    ("token_ids", _I4),
    ("logprobs", _F4),
    ("incarnations", _I4),
    ("versions", _I4),
    ("mask", _U1),
)


class BadMessage(Exception):
    """A message that may not cross the wire. `reason` is one of a few stable words, to be counted; the text is detail."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


_Word = Annotated[str, Field(min_length=1, max_length=256)]
_Length = Annotated[int, Field(ge=0, lt=2**31)]


def _short(name: str) -> str:
    if len(name.encode()) > MAX_SCORE_NAME_BYTES:
        raise ValueError(f"a name of more than {MAX_SCORE_NAME_BYTES} bytes")
    return name


_ScoreName = Annotated[str, Field(min_length=1), AfterValidator(_short)]
_Number = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]
_Scores = Annotated[dict[_ScoreName, _Number], Field(max_length=MAX_SCORES)]

_EACH = Field(min_length=1, max_length=MAX_SIBLINGS, fail_fast=True)  # one entry per sibling


class _Spec(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    name: _Word
    dtype: _Word
    shape: Annotated[list[_Length], Field(min_length=1, max_length=1)]


def _bounded(reward: float) -> float:
    if abs(reward) > MAX_REWARD:  # NaN, for an answer that could not be scored, is not
        raise ValueError(f"a reward beyond {MAX_REWARD:g}")
    return reward


class _Header(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    protocol: int
    group_id: Count
    attempt: Annotated[list[Count], Field(min_length=2, max_length=2)]
    split: Split
    rollout_id: _Word
    finish_reasons: Annotated[list[FinishReason], _EACH]
    rewards: Annotated[list[Annotated[float, AfterValidator(_bounded)]], _EACH]
    errors: Annotated[list[Annotated[str, Field(max_length=MAX_ERROR_BYTES)]], _EACH]
    scores: Annotated[list[_Scores], _EACH]
    lengths: Annotated[list[_Length], _EACH]
    arrays: Annotated[list[_Spec], Field(max_length=len(ARRAYS))]


def encode(message: Message) -> bytes:
    """One MessagePack map. Values of free-form fields that MessagePack cannot hold become text; never raises."""
    content = {name: getattr(message, name) for name in type(message).model_fields}
    content = {name: plain(value) if isinstance(value, dict) else value for name, value in content.items()}
    return _pack(content)


def decode(data: Frame, max_bytes: int = CONTROL_MAX_BYTES) -> AnyMessage:
    """The control message in `data`; raises BadMessage with reason oversize, msgpack or schema."""
    content = _unpack(data, max_bytes, max_array_len=1 << 20)
    try:
        return MESSAGE.validate_python(content)
    except ValidationError as e:
        raise BadMessage("schema", _first(e)) from None


def encode_group(group: Group) -> list[Frame]:
    """Header and arrays; copies each array once. Raises BadMessage for a group the other end would refuse."""
    siblings = group.trajectories
    lengths = [t.num_tokens for t in siblings]
    arrays = {name: _joined(name, dtype, group) for name, dtype in ARRAYS}
    rewards = [_reward(t) for t in siblings]
    header = {
        "protocol": PROTOCOL,
        "group_id": int(group.group_id),
        "attempt": [int(part) for part in group.attempt],
        "split": group.split,
        "rollout_id": group.rollout_id,
        "finish_reasons": [t.finish_reason for t in siblings],
        "rewards": [reward for reward, _ in rewards],
        "errors": [error for _, error in rewards],
        "scores": [t.scores for t in siblings],
        "lengths": lengths,
        "arrays": [{"name": n, "dtype": d.str, "shape": list(arrays[n].shape)} for n, d in ARRAYS],
    }
    _validated(header)
    for trajectory, length in zip(siblings, lengths, strict=True):
        for name, _ in ARRAYS[1:]:
            if len(getattr(trajectory, name)) != length:
                raise BadMessage("shape", f"{name} has {len(getattr(trajectory, name))} entries for {length} tokens")
    _check_values(arrays)
    return [_pack(header), *(arrays[name].view(np.uint8).data for name, _ in ARRAYS)]


def decode_group(frames: Sequence[Frame], max_bytes: int = 1 << 40) -> Group:
    """The group in `frames`, at most max_bytes over all of them.

    Raises BadMessage with reason oversize, frames, msgpack, protocol, schema, dtype, shape or values.
    """
    num_bytes = sum(len(frame) for frame in frames)
    if num_bytes > max_bytes:
        raise BadMessage("oversize", f"a group of {num_bytes} bytes, over the limit of {max_bytes}")
    if len(frames) != 1 + len(ARRAYS):
        raise BadMessage("frames", f"{len(frames)} frames where a group has {1 + len(ARRAYS)}")
    header = _validated(_unpack(frames[0], max_bytes, max_array_len=MAX_SIBLINGS))
    arrays = _views(header, frames[1:])
    _check_values(arrays)
    return Group(
        group_id=header.group_id,
        attempt=Attempt(*header.attempt),
        split=header.split,
        rollout_id=header.rollout_id,
        prompt_ids=arrays["prompt_ids"],
        trajectories=_split(header, arrays),
    )


def plain(value: Any) -> Any:
    """The value in types that MessagePack carries: numpy and tensor values as Python's, tuples and sets as lists, keys as
    text, integers beyond 64 bits, cycles and unknown objects as text. Never raises."""
    return _plain(value, ())


def _plain(value: Any, path: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, (bool, str, float, bytes)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else _text(value)
    for numpy_type, python_type in ((np.bool_, bool), (np.integer, int), (np.floating, float)):
        if isinstance(value, numpy_type):
            return python_type(value)
    if len(path) >= MAX_DEPTH or id(value) in path:
        return _text(value)
    path = (*path, id(value))
    try:
        if isinstance(value, Mapping):
            return {k if isinstance(k, str) else _text(k): _plain(v, path) for k, v in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [_plain(v, path) for v in value]
        if hasattr(value, "tolist"):  # arrays and tensors, without importing torch
            return _plain(value.tolist(), path)
    except Exception:  # a user's object may do anything
        return _text(value)
    return _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)[:4096]
    except Exception:  # also an int of more digits than Python agrees to print
        return f"<{type(value).__name__}>"


def _pack(content: dict[str, Any]) -> bytes:
    return cast(bytes, msgpack.packb(content, use_bin_type=True, unicode_errors="replace"))


def _unpack(data: Frame, max_bytes: int, max_array_len: int) -> dict[str, Any]:
    if len(data) > max_bytes:
        raise BadMessage("oversize", f"a message of {len(data)} bytes, over the limit of {max_bytes}")
    if declared_entries(data) > len(data):
        raise BadMessage("msgpack", f"{len(data)} bytes that declare more entries than that")
    try:
        content = msgpack.unpackb(
            data,
            strict_map_key=True,
            max_str_len=max_bytes,
            max_bin_len=max_bytes,
            max_array_len=max_array_len,
            max_map_len=1 << 16,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as e:
        raise BadMessage("msgpack", str(e)[:200]) from None
    if not isinstance(content, dict):
        raise BadMessage("schema", f"a {type(content).__name__} where a map is due")
    return content


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])[:100]}: {first['msg'][:200]}"


def _validated(content: dict[str, Any]) -> _Header:
    protocol = content.get("protocol")
    if protocol != PROTOCOL:
        raise BadMessage("protocol", f"a group of protocol {str(protocol)[:20]}, where {PROTOCOL} is spoken")
    try:
        header = _Header.model_validate(content)
    except ValidationError as e:
        raise BadMessage("schema", _first(e)) from None
    counts = {len(each) for each in (header.finish_reasons, header.rewards, header.errors, header.scores, header.lengths)}
    if len(counts) != 1:
        raise BadMessage("shape", f"per-sibling lists of different lengths {sorted(counts)}")
    return header


def _joined(name: str, dtype: np.dtype[Any], group: Group) -> np.ndarray:
    """The array as it travels: prompt [P], or the siblings' end to end [R]. Refuses what the type cannot hold."""
    parts = [group.prompt_ids] if name == "prompt_ids" else [getattr(t, name) for t in group.trajectories]
    try:
        flat = np.concatenate(parts) if parts else np.empty(0, dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            typed = np.ascontiguousarray(flat, dtype)
    except (ValueError, TypeError) as e:
        raise BadMessage("dtype", f"{name}: {str(e)[:200]}") from None
    if typed.ndim != 1:
        raise BadMessage("shape", f"{name} has {typed.ndim} dimensions where one is due")
    if typed.dtype != flat.dtype and dtype != _F4 and not np.array_equal(typed, flat):
        raise BadMessage("values", f"{name} has a value that {dtype.str} cannot hold")
    return typed


def _reward(trajectory: Trajectory) -> tuple[float, str]:
    """Reward and error as they travel; a reward that is no number is NaN, and the error says so."""
    error = trajectory.error
    try:
        reward = float(trajectory.reward)
    except (TypeError, ValueError, OverflowError):
        reward = float("nan")
        error = error or f"reward {_text(trajectory.reward)[:100]!r} is not a number"
    if abs(reward) > MAX_REWARD:
        reward, error = float("nan"), error or f"reward {reward:g} is beyond {MAX_REWARD:g}"
    return reward, error.encode("utf-8", "replace")[:MAX_ERROR_BYTES].decode("utf-8", "ignore")


def _views(header: _Header, frames: Sequence[Frame]) -> dict[str, np.ndarray]:
    total = sum(header.lengths)
    if len(header.arrays) != len(ARRAYS):
        raise BadMessage("frames", f"{len(header.arrays)} arrays described where a group has {len(ARRAYS)}")
    arrays: dict[str, np.ndarray] = {}
    for (name, dtype), spec, frame in zip(ARRAYS, header.arrays, frames, strict=True):
        if (spec.name, spec.dtype) != (name, dtype.str):
            raise BadMessage("dtype", f"array {spec.name!r} of type {spec.dtype!r} where {name} of {dtype.str} is due")
        count = spec.shape[0]
        if name != "prompt_ids" and count != total:
            raise BadMessage("shape", f"{name} has {count} entries for {total} response tokens")
        if len(frame) != count * dtype.itemsize:
            raise BadMessage("shape", f"{name} has {len(frame)} bytes for {count} entries of {dtype.str}")
        array = np.frombuffer(frame, dtype)
        # zmq hands out small frames at any address of its buffer: those, and only those, are copied into line
        arrays[name] = array if array.flags.aligned else array.copy()
    return arrays


def _check_values(arrays: dict[str, np.ndarray]) -> None:
    for name, dtype in ARRAYS:
        array = arrays[name]
        if dtype == _I4 and array.size and array.min() < 0:
            raise BadMessage("values", f"{name} has a negative entry")
        if dtype == _U1 and array.size and array.max() > 1:
            raise BadMessage("values", f"{name} has an entry other than 0 and 1")


def _split(header: _Header, arrays: dict[str, np.ndarray]) -> tuple[Trajectory, ...]:
    mask_R = arrays["mask"].view(np.bool_)
    ends = np.cumsum(header.lengths)
    siblings = []
    for i, (end, length) in enumerate(zip(ends.tolist(), header.lengths, strict=True)):
        at = slice(end - length, end)
        siblings.append(
            Trajectory(
                token_ids=arrays["token_ids"][at],
                logprobs=arrays["logprobs"][at],
                incarnations=arrays["incarnations"][at],
                versions=arrays["versions"][at],
                mask=mask_R[at],
                finish_reason=header.finish_reasons[i],
                reward=header.rewards[i],
                error=header.errors[i],
                scores=header.scores[i],
            )
        )
    return tuple(siblings)
