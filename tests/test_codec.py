"""The byte formats: what goes in comes out, what is wrong is refused with its reason, nothing else is ever raised."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from async_rl.config import parse_config
from async_rl.transport.codec import MAX_DEPTH, MAX_ERROR_BYTES, BadMessage, decode, decode_group, encode, encode_group, plain
from async_rl.transport.messages import PROTOCOL, Commit, Committed, Heartbeat, Hello, Lease, Prepare, Welcome
from async_rl.types import MAX_REWARD, MAX_SCORES, Attempt, Group, Trajectory

from .transport_samples import assert_same_group, make_group, make_trajectory

INT32 = st.integers(0, 2**31 - 1)
FINITE = st.floats(-MAX_REWARD, MAX_REWARD)


def make_lease(**changes: Any) -> Lease:
    return Lease(
        **{
            "group_id": 3,
            "attempt": (1, 0),
            "split": "train",
            "born": (1, 4),
            "prompt_id": "p3",
            "prompt_ids": [5, 6],
            "text": "2+2=",
            "fields": {"answer": "4"},
            "num_samples": 8,
            "max_new_tokens": 16,
            "temperature": 1.0,
            "seed": 2**63 - 1,
            "timeout_s": 10.0,
        }
        | changes
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    n = draw(st.integers(0, 6))
    return Trajectory(
        token_ids=draw(npst.arrays(np.int32, n, elements=INT32)),
        logprobs=draw(npst.arrays(np.float32, n, elements=st.floats(width=32))),
        incarnations=draw(npst.arrays(np.int32, n, elements=INT32)),
        versions=draw(npst.arrays(np.int32, n, elements=INT32)),
        mask=draw(npst.arrays(np.bool_, n)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort", "error"])),
        reward=draw(FINITE | st.just(math.nan)),
        error=draw(st.text(st.characters(codec="utf-8"), max_size=90)),
        scores=draw(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=16), FINITE, max_size=16)),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    return Group(
        group_id=draw(st.integers(0, 2**63 - 1)),
        attempt=Attempt(*draw(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)))),
        split=draw(st.sampled_from(["train", "eval"])),
        rollout_id=draw(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)),
        prompt_ids=draw(npst.arrays(np.int32, st.integers(0, 5), elements=INT32)),
        trajectories=tuple(draw(st.lists(trajectories(), min_size=1, max_size=4))),
    )


@given(groups())
@settings(max_examples=50, deadline=None)
def test_a_group_comes_out_as_it_went_in(group: Group) -> None:
    assert_same_group(decode_group(encode_group(group)), group)


@pytest.mark.parametrize(
    "message",
    [
        Hello(protocol=1, run_id="r", config_digest="c", tokenizer_digest="t", name="rollout-0", num_slots=8),
        Welcome(rollout_id="rollout-0#1", incarnation=1, version=0, data_address="tcp://127.0.0.1:5"),
        make_lease(),
        Prepare(
            incarnation=1, version=2, membership=3, backend="gloo", host="::1", port=0, tag="x", rank=1, world_size=2,
            manifest={"tensors": [["a", "float32", [2, 3]]], "bucket_bytes": 2**40}, timeout_s=1.5,
        ),
        Commit(incarnation=1, version=2, membership=3, bucket_digests=["aa", "bb"]),
        Committed(membership=3, version=2, checksum="ff"),
        Heartbeat(free_slots=2, engine_age_s=1e9),
    ],
)  # fmt: skip
def test_a_control_message_comes_out_as_it_went_in(message: Any) -> None:
    assert decode(encode(message)) == message


def test_odd_values_in_lease_fields_travel_as_the_nearest_plain_ones() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    tensor = SimpleNamespace(tolist=lambda: 1.0)  # what a torch scalar looks like from here
    fields = {
        "np": [np.float32(0.5), np.int64(3), np.bool_(True), np.array([[1, 2]]), np.str_("s"), np.longdouble(2)],
        "map": {1: 2, "x": 2**70, b"k": (1, 2)},
        "tensor": tensor,
        "object": object(),
        "decimal": Decimal("1.5"),
        "huge": 10**5000,
        "surrogate": "a\ud800b",
        "loop": loop,
        "deep": deep,
    }
    got = decode(encode(make_lease(fields=fields)))
    assert isinstance(got, Lease)
    assert got.fields["np"] == [0.5, 3, True, [[1, 2]], "s", 2.0]
    assert got.fields["map"] == {"1": 2, "x": str(2**70), "b'k'": [1, 2]}
    assert (got.fields["tensor"], got.fields["decimal"], got.fields["huge"]) == (1.0, "1.5", "<int>")
    assert got.fields["object"].startswith("<object object")
    assert got.fields["surrogate"] == "a?b"
    depth, inner = 0, got.fields["deep"]
    while isinstance(inner, list):
        depth, inner = depth + 1, inner[0]
    assert isinstance(inner, str) and depth < MAX_DEPTH
    assert got.fields["loop"][0] == 1 and isinstance(got.fields["loop"][1], str)


def test_plain_survives_an_object_that_raises_at_everything() -> None:
    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError

    assert plain({"a": Hostile()}) == {"a": "<Hostile>"}


@pytest.mark.parametrize("reward", [np.float32(0.25), np.float64(0.25), Decimal("0.25"), np.array(0.25)])
def test_a_reward_of_any_numeric_type_arrives_as_a_float(reward: Any) -> None:
    group = dataclasses.replace(make_group(), trajectories=(make_trajectory(2, reward=reward),))
    got = decode_group(encode_group(group)).trajectories[0].reward
    assert type(got) is float and got == 0.25


@pytest.mark.parametrize(("reward", "says"), [(None, "None"), (1e308, "beyond 1e+12"), (-math.inf, "beyond")])
def test_a_reward_that_is_no_number_to_learn_from_arrives_as_nan_with_its_reason(reward: Any, says: str) -> None:
    group = dataclasses.replace(make_group(), trajectories=(make_trajectory(2, reward=reward),))
    got = decode_group(encode_group(group)).trajectories[0]
    assert math.isnan(got.reward) and says in got.error


def test_a_long_error_is_cut_at_a_character_and_the_header_stays_within_its_allowance() -> None:
    scores = {f"{i:02}" + "é" * 31: -1e-300 for i in range(MAX_SCORES)}
    siblings = tuple(make_trajectory(0, error="é" * 1000, scores=scores) for _ in range(100))
    group = dataclasses.replace(make_group(), rollout_id="r" * 256, trajectories=siblings)
    frames = encode_group(group)
    settings = parse_config({"num_steps": 1, "groups_per_step": 1, "group_size": 100, "model": {"path": "x"}})
    arrays = 4 * settings.model.max_model_len + 17 * 100 * settings.rollout.max_new_tokens
    assert len(frames[0]) <= settings.max_group_bytes - arrays
    assert decode_group(frames).trajectories[0].error == "é" * (MAX_ERROR_BYTES // 2)


def test_a_lease_says_over_the_wire_whether_its_last_answer_is_greedy() -> None:
    assert not make_lease().greedy
    for greedy in (False, True):
        assert decode(encode(make_lease(greedy=greedy))) == make_lease(greedy=greedy)


def test_decoding_copies_no_array() -> None:
    frames = encode_group(make_group(lengths=(500, 700)))
    got = decode_group(frames)
    for name, frame in (("token_ids", frames[2]), ("logprobs", frames[3]), ("mask", frames[6])):
        assert np.shares_memory(getattr(got.trajectories[1], name), np.frombuffer(frame, np.uint8))


def test_a_frame_at_an_odd_address_decodes_to_aligned_arrays() -> None:
    group = make_group(lengths=(40,))
    shifted = [memoryview(b"x" + bytes(frame))[1:] for frame in encode_group(group)]
    got = decode_group(shifted)
    assert_same_group(got, group)
    assert got.trajectories[0].token_ids.flags.aligned


def _with_header(**changes: Any) -> list[Any]:
    frames = encode_group(make_group(lengths=(3, 5)))
    header = msgpack.unpackb(frames[0]) | changes
    return [msgpack.packb({k: v for k, v in header.items() if v is not ...}), *frames[1:]]


def _with_frame(index: int, data: bytes) -> list[Any]:
    frames: list[Any] = list(encode_group(make_group(lengths=(3, 5))))
    frames[index] = data
    return frames


def _arrays(index: int, **changes: Any) -> list[dict[str, Any]]:
    arrays = msgpack.unpackb(encode_group(make_group(lengths=(3, 5)))[0])["arrays"]
    arrays[index] |= changes
    return arrays


def _i4(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


@pytest.mark.parametrize(
    ("reason", "frames"),
    [
        ("frames", []),
        ("frames", [b"one"]),
        ("frames", [*_with_header(), b"one more"]),
        ("frames", _with_header(arrays=[])),
        ("msgpack", _with_frame(0, b"\xc1")),
        ("msgpack", _with_frame(0, b"")),
        ("msgpack", _with_frame(0, b"\xdd\xff\xff\xff\xff")),
        ("msgpack", _with_frame(0, b"\x91" * 100_000)),
        ("msgpack", _with_frame(0, pickle.dumps(make_group))),
        ("protocol", _with_header(protocol=PROTOCOL - 1)),
        ("protocol", _with_header(protocol=...)),
        ("protocol", _with_frame(0, b"\x80")),
        ("schema", _with_frame(0, b"\x01")),
        ("schema", _with_header(protocol=float(PROTOCOL))),
        ("schema", _with_header(group_id=-1)),
        ("schema", _with_header(group_id=2**63)),
        ("schema", _with_header(group_id="7")),
        ("schema", _with_header(attempt=[1])),
        ("schema", _with_header(split="test")),
        ("schema", _with_header(rollout_id="")),
        ("schema", _with_header(surprise=1)),
        ("schema", _with_header(finish_reasons=["stop", "bored"])),
        ("schema", _with_header(rewards=[1.0, None])),
        ("schema", _with_header(rewards=[1.0, 1e13])),
        ("schema", _with_header(rewards=[1.0, -math.inf])),
        ("schema", _with_header(lengths=[9, -1])),
        ("schema", _with_header(scores=...)),
        ("schema", _with_header(scores=[{}, {"a": "1"}])),
        ("schema", _with_header(scores=[{}, {"a": math.nan}])),
        ("schema", _with_header(scores=[{}, {"": 1.0}])),
        ("schema", _with_header(scores=[{}, {"é" * 33: 1.0}])),
        ("schema", _with_header(scores=[{}, {f"s{i}": 1.0 for i in range(17)}])),
        ("shape", _with_header(scores=[{}])),
        ("schema", _with_header(lengths=[], rewards=[], errors=[], scores=[], finish_reasons=[])),
        ("shape", _with_header(rewards=[1.0])),
        ("shape", _with_header(lengths=[3, 6])),
        ("shape", _with_header(lengths=[2**31 - 1, 2**31 - 1])),
        ("schema", _with_header(arrays=_arrays(1, shape=[2, 4]))),
        ("shape", _with_header(arrays=_arrays(0, shape=[5]))),
        ("dtype", _with_header(arrays=_arrays(1, dtype="<i8"))),
        ("dtype", _with_header(arrays=_arrays(2, dtype="|O"))),
        ("dtype", _with_header(arrays=_arrays(1, name="logprobs"))),
        ("shape", _with_frame(2, _i4(1, 2, 3))),
        ("shape", _with_frame(2, b"")),
        ("values", _with_frame(1, _i4(0, 1, 2, -3))),
        ("values", _with_frame(2, _i4(*range(7), -1))),
        ("values", _with_frame(4, _i4(*range(7), -1))),
        ("values", _with_frame(5, _i4(*range(7), -1))),
        ("values", _with_frame(6, b"\0\1\0\1\0\1\0\2")),
    ],
)
def test_a_wrong_group_is_refused_with_its_reason(reason: str, frames: list[Any]) -> None:
    with pytest.raises(BadMessage) as e:
        decode_group(frames)
    assert e.value.reason == reason
    assert len(str(e.value)) < 500


def test_a_group_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(BadMessage, match="oversize: a group of 1001 bytes, over the limit of 1000"):
        decode_group([b"\xc1" * 1000, b"x"], max_bytes=1000)


def test_a_group_whose_arrays_disagree_is_refused_at_the_sender() -> None:
    short = dataclasses.replace(make_trajectory(5), versions=np.zeros(4, np.int32))
    with pytest.raises(BadMessage, match="versions has 4 entries for 5 tokens"):
        encode_group(dataclasses.replace(make_group(), trajectories=(short,)))


def test_an_id_beyond_32_bits_is_refused_at_the_sender_instead_of_wrapped() -> None:
    wide = dataclasses.replace(make_trajectory(2), token_ids=np.array([1, 2**32 + 1]))
    with pytest.raises(BadMessage, match="token_ids has a value that <i4 cannot hold"):
        encode_group(dataclasses.replace(make_group(), trajectories=(wide,)))


def test_log_probs_are_not_judged_on_the_wire() -> None:
    odd = np.array([np.nan, -np.inf, 0.5], np.float32)
    group = dataclasses.replace(make_group(), trajectories=(dataclasses.replace(make_trajectory(3), logprobs=odd),))
    assert decode_group(encode_group(group)).trajectories[0].logprobs.tobytes() == odd.tobytes()


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        ("msgpack", b""),
        ("msgpack", b"\x00\x00"),
        ("msgpack", pickle.dumps({"kind": "hello"})),
        ("msgpack", b"\xc7\x08\x05" + b"x" * 8),  # an extension type
        ("msgpack", msgpack.packb({1: 2})),
        ("schema", msgpack.packb([1, 2])),
        ("schema", msgpack.packb({"kind": "exec"})),
        ("schema", msgpack.packb({"kind": "heartbeat", "surprise": 1})),
        ("schema", msgpack.packb({"kind": "heartbeat", "free_slots": -1})),
        ("schema", msgpack.packb({"kind": "commit", "bucket_digests": [None] * 100_000})),
        ("oversize", b"\x80" * 101),
    ],
)
def test_a_wrong_control_message_is_refused_with_its_reason(reason: str, data: bytes) -> None:
    with pytest.raises(BadMessage) as e:
        decode(data, max_bytes=100 if reason == "oversize" else 1 << 20)
    assert e.value.reason == reason
    assert len(str(e.value)) < 500


MUTATIONS = st.tuples(st.integers(0, 6), st.sampled_from(["flip", "cut", "insert"]), st.integers(0, 999), st.integers(0, 255))


@given(st.lists(MUTATIONS, min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_mutated_frames_decode_or_are_refused_and_nothing_else(mutations: list[tuple[int, str, int, int]]) -> None:
    frames = [bytearray(frame) for frame in encode_group(make_group())]
    for index, kind, position, byte in mutations:
        frame = frames[index]
        at = position % (len(frame) or 1)
        if kind == "flip":
            frame[at : at + 1] = bytes([byte])
        elif kind == "cut":
            del frame[at:]
        else:
            frame[at:at] = bytes([byte])
    _decodes_or_is_refused(lambda: decode_group([bytes(frame) for frame in frames]))


@given(st.binary(max_size=300))
@settings(max_examples=100, deadline=None)
def test_random_bytes_decode_or_are_refused_and_nothing_else(data: bytes) -> None:
    _decodes_or_is_refused(lambda: decode(data))
    _decodes_or_is_refused(lambda: decode_group([data] * 7))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.binary(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(st.sampled_from(sorted(Lease.model_fields)), JSON)
@settings(max_examples=100, deadline=None)
def test_a_field_of_any_type_decodes_or_is_refused_and_nothing_else(name: str, value: Any) -> None:
    content = msgpack.unpackb(encode(make_lease())) | {name: value}
    data = cast(bytes, msgpack.packb(content))
    _decodes_or_is_refused(lambda: decode(data))


def _decodes_or_is_refused(attempt: Callable[[], Any]) -> None:
    reason = None
    try:
        attempt()
    except BadMessage as e:
        reason = e.reason
    assert reason in {None, "oversize", "frames", "msgpack", "protocol", "schema", "dtype", "shape", "values"}
