"""The manifest: one cut of one byte stream, and a refusal before any byte moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.weights.base import WeightsError
from async_rl.weights.manifest import ALIGN_BYTES, ITEM_BYTES, Manifest, TensorSpec

SHAPES = st.lists(st.integers(1, 12), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), min_size=1, max_size=12)


def make(*tensors: tuple[str, str, tuple[int, ...]], bucket_bytes: int = 64, ties: dict[str, str] | None = None) -> Manifest:
    return Manifest(tuple(TensorSpec(*t) for t in tensors), bucket_bytes, ties or {})


@settings(deadline=None)
@given(SPECS, st.integers(1, 40))
def test_every_byte_of_every_tensor_lies_in_exactly_one_bucket(specs, bucket_units):
    manifest = make(*[(str(i), *spec) for i, spec in enumerate(specs)], bucket_bytes=bucket_units * ALIGN_BYTES)
    stream = bytearray(manifest.num_bytes)
    for bucket in manifest.buckets:
        assert 0 < bucket.num_bytes <= manifest.bucket_bytes
        for part in bucket.parts:
            start = bucket.start + part.bucket_offset
            assert start == manifest.offsets[part.tensor] + part.tensor_offset
            for byte in range(start, start + part.num_bytes):
                stream[byte] += 1
    for offset, spec in zip(manifest.offsets, manifest.tensors, strict=True):
        assert offset % ALIGN_BYTES == 0
        assert set(stream[offset : offset + spec.num_bytes]) <= {1}
    assert sum(stream) == sum(spec.num_bytes for spec in manifest.tensors)
    assert [b.start for b in manifest.buckets[1:]] == [b.end for b in manifest.buckets[:-1]]


def test_the_wire_form_gives_back_the_same_manifest_and_digest():
    manifest = make(("a", "bfloat16", (3, 5)), ("b", "float32", ()), ties={"c": "a"})
    again = Manifest.from_dict(manifest.to_dict())
    assert again == manifest and again.digest == manifest.digest
    assert make(("a", "bfloat16", (5, 3)), ("b", "float32", ()), ties={"c": "a"}).digest != manifest.digest


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": []},
        {"tensors": [["a", "float31", [2]]]},
        {"tensors": [["a", "float32", [-1]]]},
        {"tensors": [["a", "float32", [2]], ["a", "float32", [2]]]},
        {"tensors": [["a", "float32"]]},
        {"tensors": [["a", "float32", [0]]]},
        {"bucket_bytes": 0},
        {"bucket_bytes": 24},
        {"bucket_bytes": "64"},
        {"ties": {"a": "a"}},
        {"ties": {"b": "nobody"}},
        {"ties": None},
    ],
)
def test_a_malformed_manifest_is_refused(change):
    with pytest.raises(WeightsError, match="malformed"):
        Manifest.from_dict(make(("a", "float32", (2,))).to_dict() | change)


def test_names_dtypes_and_shapes_that_do_not_fit_are_all_named_in_one_sentence():
    manifest = make(("a", "float32", (2,)), ("b", "float32", (3,)), ("c", "bfloat16", (4,)), ("d", "float32", (5,)))
    expected = {"a": ("float32", (2,)), "b": ("float32", (4,)), "c": ("float32", (4,)), "e": ("float32", (5,))}
    with pytest.raises(WeightsError) as error:
        manifest.check_against(expected)
    text = str(error.value)
    assert "missing: e;" in text and "unexpected: d;" in text
    assert "b float32[3] instead of float32[4], c bfloat16[4] instead of float32[4]" in text
    assert "\n" not in text and " a " not in text


def test_at_most_ten_names_are_listed():
    manifest = make(("a", "float32", (2,)))
    expected = {"a": ("float32", (2,))} | {f"x{i:02}": ("float32", (2,)) for i in range(25)}
    with pytest.raises(WeightsError, match="x09 and 15 more"):
        manifest.check_against(expected)
