"""What a stranger, a broken rollout or a noisy wire may send: valid messages, and everything that can be done to them."""

from __future__ import annotations

import random
import struct
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgpack
import numpy as np

from async_rl.transport.codec import CONTROL_MAX_BYTES, encode, encode_group
from async_rl.transport.messages import (
    PROTOCOL,
    Ack,
    Cancel,
    Commit,
    Committed,
    End,
    Error,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Message,
    Prepare,
    Prepared,
    Staged,
    Welcome,
)
from async_rl.types import Attempt, Group
from tests.ledger_samples import make_trajectory

INTS = (0, 1, 2, 7, 127, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**47, 2**62, 2**63 - 1)
ODD: tuple[Any, ...] = (
    *(None, True, -1, -(2**63), 2**64 - 1, 2**63, 1e308, -1e308, float("nan"), float("inf"), -float("inf"), 5e-324),
    *("", "a", "\x1b[2J\x07", "x" * 5000, b"", b"\xff" * 9, [], {}, [[]], {"": None}, [0] * 300, {"a": {"b": [1, {}]}}),
    *({"kind": "hello"}, "1", "NaN", [None] * 17, {str(i): i for i in range(70)}),
)
RAW = (  # what no Python value packs to
    b"\xd6\xff\0\0\0\0", b"\xd7\xff" + b"\xff" * 8, b"\xc7\x0c\xff" + b"\xff" * 12,  # timestamps
    b"\xd4\x05x", b"\xc7\x08\x05" + b"x" * 8, b"\xc9\xff\xff\xff\xff\x05",  # extensions
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff",  # lengths that lie
    b"\xdc\xff\xff" * 900, b"\xde\xff\xff" * 900, b"\xdd\0\1\0\0" * 600,  # and nested ones
    b"\x91" * 2000 + b"\xc0", b"\x81\xa1a" * 1500 + b"\xc0", b"\x91" * 500 + b"\xc0",  # deep
    b"\xa3\xed\xa0\x80", b"\xa1\xff", b"\xc1", b"\xca\x7f\xc0\0\0", b"\x81\x01\x02", b"\x82\xa1a\x01\xa1a\x02",
)  # fmt: skip
MARK = 0x1FEEDFACE  # stands in a packed message where raw bytes go
PEERS = tuple(f"peer-{i}".encode() for i in range(6))
NAMES = ("a", "b", "rollout-0", "rollout-1")
Channel = Literal["control", "data"]


@dataclass(frozen=True)
class Input:
    channel: Channel
    frames: list[bytes]  # of a control message: the peer, the message

    @property
    def num_bytes(self) -> int:
        return sum(len(frame) for frame in self.frames[self.channel == "control" :])


@dataclass(frozen=True)
class Known:
    """What the run has let out so far, for inputs that nearly fit."""

    identity: dict[str, str]
    rollout_ids: deque[str]
    leases: deque[Lease]
    version: int


class Inputs:
    """An endless stream of inputs, the same for the same seed and the same `Known`."""

    def __init__(self, seed: int, max_message_bytes: int) -> None:
        self.rng = random.Random(seed)
        self.max_message_bytes = max_message_bytes
        self._past: deque[Input] = deque(maxlen=64)
        self._whole: deque[list[bytes]] = deque(maxlen=64)  # groups as they were before anything was done to them

    def draw(self, known: Known) -> Input:
        rng = self.rng
        if self._past and rng.random() < 0.08:  # again, perhaps over another connection
            past = rng.choice(self._past)
            return past if past.channel == "data" else Input("control", [rng.choice(PEERS), *past.frames[1:]])
        drawn = self._group(known) if rng.random() < 0.45 else self._said(known)
        self._past.append(drawn)
        return drawn

    # ---- control

    def _said(self, known: Known) -> Input:
        rng = self.rng
        content = encode(self._message(known))
        how = rng.random()
        if how < 0.35:
            content = self._confused(content)
        elif how < 0.65:
            content = self._damaged(content, b"".join(self._past[-1].frames[-1:]) if self._past else b"")
        elif how < 0.68:
            content = rng.choice((*RAW, rng.randbytes(rng.randrange(200))))
        elif how < 0.6801:
            content = bytes(CONTROL_MAX_BYTES + 1)
        frames = [rng.choice(PEERS), content]
        return Input("control", frames + [b"more"] * (rng.random() < 0.01))

    def _message(self, known: Known) -> Message:
        """Of every kind, also those that only the learner sends; mostly such as an honest rollout would say."""
        rng = self.rng
        number = lambda: known.version if rng.random() < 0.5 else rng.choice(INTS)  # noqa: E731
        group_id, attempt = rng.choice(INTS), (rng.choice(INTS), rng.choice(INTS))
        hello = {
            "protocol": PROTOCOL, **known.identity, "name": rng.choice(NAMES), "num_slots": rng.choice((1, 8, 4096)),
            "pid": rng.choice((1, 2, rng.choice(INTS))), "num_workers": rng.choice((1, 1, 1, 2)),
        }  # fmt: skip
        return rng.choice(
            (
                lambda: Hello(**cast(Any, hello)),
                lambda: Hello(**cast(Any, hello)),
                lambda: Heartbeat(
                    free_slots=number(), generated_tokens=rng.randrange(2**48), engine_age_s=rng.choice((0.0, 30.0, 1e9))
                ),
                lambda: Heartbeat(free_slots=8),
                lambda: Prepared(membership=number(), version=number()),
                lambda: Staged(membership=number(), version=number()),
                lambda: Committed(membership=number(), version=number(), checksum="ff"),
                lambda: Error(code=rng.choice(("rejoin", "fatal", "weights", "refused")), text="no", membership=number()),
                lambda: Goodbye(reason="enough"),
                lambda: Ack(group_id=group_id, attempt=attempt, outcome="accepted"),
                lambda: Cancel(group_id=group_id, attempt=attempt, reason="no"),
                lambda: End(reason="no"),
                lambda: Welcome(rollout_id="x", incarnation=1, version=number(), data_address="tcp://127.0.0.1:5"),
                lambda: Commit(incarnation=1, version=number(), membership=number(), bucket_digests=["aa"]),
                lambda: Prepare(
                    incarnation=1, version=2, membership=3, backend="gloo", host="::1", port=0, tag="x", rank=1,
                    world_size=2, manifest={"tensors": [["a", "float32", [2, 3]]]}, timeout_s=1.5,
                ),
                lambda: known.leases[-1] if known.leases else End(reason="nothing leased"),
            )
        )()  # fmt: skip

    # ---- groups

    def _group(self, known: Known) -> Input:
        rng = self.rng
        how = rng.random()
        if not self._whole or how >= 0.68 or rng.random() < 0.2:
            self._whole.append([bytes(frame) for frame in encode_group(self._delivery(known))])
        frames = list(self._whole[-1] if how >= 0.68 else rng.choice(self._whole))
        if how < 0.3:
            frames[0] = self._confused(frames[0])
        elif how < 0.6:
            i = rng.randrange(len(frames))
            frames[i] = self._damaged(frames[i], frames[rng.randrange(len(frames))])
        elif how < 0.65:
            frames = frames[: rng.randrange(len(frames))] + [b"x"] * rng.randrange(3)
        elif how < 0.67:
            frames[0] = rng.choice(RAW)
        elif how < 0.68:
            frames[1] = bytes(self.max_message_bytes)
        return Input("data", frames)

    def _delivery(self, known: Known) -> Group:
        """An answer to a lease that somebody has or had, with something or nothing wrong with it."""
        rng = self.rng
        if not known.leases or rng.random() < 0.1:
            group_id, attempt, split, ids, size = rng.choice(INTS), (rng.choice(INTS), rng.choice(INTS)), "train", [1, 2], 2
        else:
            lease = rng.choice(known.leases)
            group_id, attempt, split = lease.group_id, lease.attempt, lease.split
            ids, size = lease.prompt_ids, lease.num_samples
        if rng.random() < 0.2:
            attempt = (rng.choice((attempt[0], *INTS)), rng.choice((attempt[1], *INTS)))
        split = split if rng.random() < 0.95 else rng.choice(("train", "eval"))
        size = size if rng.random() < 0.95 else rng.randint(1, 5)
        siblings = []
        for _ in range(size):
            n = rng.choice((0, 1, 3, 8, 9)) if rng.random() < 0.2 else 3
            versions = [rng.choice((known.version, known.version, rng.choice(INTS[:8]))) for _ in range(n)]
            incarnations = [1] * n if rng.random() < 0.95 else [rng.choice(INTS[:8])] * n
            t = make_trajectory(versions, incarnations, [rng.random() < 0.9 for _ in range(n)])
            odd: dict[str, Any] = {"reward": rng.choice((0.0, 1.0, float("nan"), 1e12, -0.0))}
            if rng.random() < 0.05:
                odd["logprobs"] = np.full(n, rng.choice((np.nan, -np.inf, 5.0)), np.float32)
                odd["error"] = "reward x raised \x1b[2J: " + rng.choice(("a", "b")) * 3
            siblings.append(t.__class__(**(t.__dict__ | odd)))
        name = rng.choice((*known.rollout_ids, "\x1b[2J\n", "nobody#9")) if known.rollout_ids else "nobody#9"
        return Group(group_id, Attempt(*attempt), cast(Any, split), name, np.array(ids, np.int32), tuple(siblings))

    # ---- what is done to bytes

    def _confused(self, content: bytes) -> bytes:
        """One field, or an entry of it, of another type or value; a field too much, or one too few."""
        rng = self.rng
        fields = msgpack.unpackb(content, strict_map_key=False)
        key, raw = rng.choice(list(fields)), b""
        value: Any = rng.choice(ODD)
        if rng.random() < 0.2:
            value, raw = MARK, rng.choice(RAW)
        match rng.randrange(5):
            case 0:
                del fields[key]
            case 1:
                fields[rng.choice(("surprise", "kind", "protocol", "x" * 300))] = value
            case 2 if isinstance(fields[key], list) and fields[key]:
                fields[key][rng.randrange(len(fields[key]))] = value
            case _:
                fields[key] = value
        packed = cast(bytes, msgpack.packb(fields))
        return packed.replace(cast(bytes, msgpack.packb(MARK)), raw) if raw else packed

    def _damaged(self, content: bytes, other: bytes) -> bytes:
        rng = self.rng
        data = bytearray(content)
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(8):
                case 0 if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
                case 1 if at < len(data):
                    data[at] = rng.choice((0, 0x7F, 0x80, 0xC0, 0xC1, 0xCB, 0xCF, 0xD3, 0xD9, 0xDC, 0xDD, 0xDF, 0xFF))
                case 2:
                    del data[at:]
                case 3:
                    data[at:at] = rng.randbytes(rng.randrange(9))
                case 4:
                    data[at:] = other[rng.randrange(len(other) + 1) :]
                case 5:
                    data[at : at + 8] = struct.pack(rng.choice("<>") + "d", rng.choice((float("nan"), float("inf"), 1e300)))
                case 6:
                    data[at:at] = rng.choice(RAW)
                case _:
                    data[at:at] = data[at : at + rng.randrange(40)]
        return bytes(data[:20000])
