"""Hostile input to the learner's gate and control plane: a minute of it, and hypothesis' shrinkable short lives."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from async_rl.transport.codec import MAX_SIBLINGS, BadMessage, decode, decode_group, encode_group
from async_rl.transport.declared import declared_entries
from tests.fuzz import BYTES_MORE, BYTES_PER_BYTE, Life, run
from tests.transport_samples import make_group


def assert_counted(result: dict) -> None:
    assert result["crashes"] == 0
    assert sum(result["refused"].values()) == result["inputs"] - result["accepted"]
    assert {"schema", "msgpack", "shape", "frames", "protocol"} <= set(result["refused"])
    assert {"unknown_peer", "lease_expired", "unexpected_message"} <= set(result["control"])


def test_hostile_inputs_crash_nothing_and_each_refusal_is_counted_by_its_reason() -> None:
    assert_counted(run(2000, seed=5))


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_a_minute_of_hostile_inputs() -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"python -m tests.fuzz --inputs 100000 --seed {seed}")  # what a failure needs
    assert_counted(run(float("inf"), seed, seconds=60))


class Strangers(RuleBasedStateMachine):
    """The same inputs, in an order that hypothesis can shrink; at its end an honest rollout comes."""

    @initialize(seed=st.integers(0, 2**20))
    def begin(self, seed: int) -> None:
        self.life = Life(seed)

    @rule(rng=st.randoms(use_true_random=False), count=st.integers(1, 8))
    def turn(self, rng: random.Random, count: int) -> None:
        self.life.rng = self.life.inputs.rng = rng
        self.life.turn(count)

    @invariant()
    def check(self) -> None:
        if hasattr(self, "life"):
            self.life.check()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            self.life.rng = random.Random(0)
            self.life.honest()
            self.life.end()


TestStrangers = pytest.mark.timeout(600)(Strangers.TestCase)
TestStrangers.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


def _greedy_messages() -> dict[str, list[Any]]:
    """Each the worst of its kind: the most memory for its size."""
    frames = [bytes(frame) for frame in encode_group(make_group())]
    header = msgpack.unpackb(frames[0])
    many = header | {"finish_reasons": ["stop"] * MAX_SIBLINGS, "rewards": [0] * MAX_SIBLINGS, "errors": [""] * MAX_SIBLINGS}
    many |= {"scores": [{}] * MAX_SIBLINGS, "lengths": [0] * MAX_SIBLINGS}
    many["arrays"] = [array | {"shape": [0]} for array in header["arrays"]]
    keys = {f"{i:x}": 1 for i in range(60_000)}
    return {
        "nested lists": [b"\xdc\xff\xff" * 1500],
        "nested maps": [b"\xde\xff\xff" * 1500],
        "one long list": [b"\xdd\x00\x0f\xff\xff"],
        "unknown keys": [msgpack.packb({"kind": "heartbeat"} | keys)],
        "empty maps": [msgpack.packb({"kind": "lease", "fields": {"a": [{}] * 100_000}})],
        "a group of many": [msgpack.packb(many), *[b""] * 6],
        "a group of unknown keys": [msgpack.packb(header | keys), *frames[1:]],
        "a group of nested lists": [b"\xdc\xff\xff" * 1500, *frames[1:]],
    }


@pytest.mark.parametrize("name", _greedy_messages())
def test_the_greediest_messages_stay_within_the_bound_of_what_reading_them_may_allocate(name: str) -> None:
    frames = _greedy_messages()[name]
    size = sum(map(len, frames))
    tracemalloc.start()
    try:
        decode_group(frames) if len(frames) > 1 else decode(frames[0])
    except BadMessage:
        pass
    finally:
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert used <= BYTES_PER_BYTE * size + BYTES_MORE, f"{used / size:.0f} times its size"


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        (1, 0),
        ([], 0),
        ([1, 2.5, "x", b"y", None], 5),
        ({"a": [1, 2], "b": {"c": "d"}}, 4 + 2 + 2),
        (["x" * 300, b"z" * 70_000, [[]] * 20, -(2**63)], 4 + 20),
        (list(range(70_000)), 70_000),
    ],
)
def test_declared_entries_are_those_that_are_there(value: object, entries: int) -> None:
    packed = msgpack.packb(value)
    assert isinstance(packed, bytes)
    assert declared_entries(packed) == declared_entries(memoryview(packed)) == entries
