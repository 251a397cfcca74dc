"""Which prompt comes next and with how many answers: by schedule, by difficulty, and on from a checkpoint."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgpack
import pytest

from async_rl.data.prompts import PromptError, PromptStream
from async_rl.learner.control.dealer import Dealer
from async_rl.learner.control.sizes import BySchedule, groups_at, size_at, sizes_of

from .ledger_samples import make_prompt, packed
from .scripted_members import Rollout, Scene, make_config

NUM_PROMPTS = 10
ADAPTIVE: dict[str, Any] = {"groups_per_step": 4, "group_size": 6, "adaptive_group_sizes": [2, 12]}


def dealer(seed: int = 0, greedy: bool = False, **changes: Any) -> Dealer:
    stream = PromptStream([make_prompt(i) for i in range(NUM_PROMPTS)], seed)
    return Dealer(stream, sizes_of(make_config(**changes)), greedy)


def dealt(d: Dealer, num: int, step: int = 0) -> list[tuple[str, int]]:
    return [(prompt.prompt_id, size) for prompt, size in (d.deal(step) for _ in range(num))]


def resumed(d: Dealer, **changes: Any) -> Dealer:
    other = dealer(**changes)
    other.load_state_dict(msgpack.unpackb(packed(d.state_dict()), strict_map_key=False))
    return other


# ---- by schedule


@pytest.mark.parametrize(("start", "end", "groups"), [(2, 8, 8), (8, 2, 2), (4, 4, 3)])
def test_a_size_by_schedule_keeps_the_answers_of_a_step(start: int, end: int, groups: int):
    config = make_config(num_steps=12, group_size=start, group_size_end=end, groups_per_step=groups)
    steps = range(12)
    assert {groups_at(config, k) * size_at(config, k) for k in steps} == {groups * start}
    assert (size_at(config, 0), size_at(config, 11)) == (start, end)
    d = dealer(num_steps=12, group_size=start, group_size_end=end, groups_per_step=groups)
    assert [d.deal(k)[1] for k in steps] == [size_at(config, k) for k in steps]


def test_without_a_schedule_every_group_is_alike_also_one_of_a_single_answer():
    assert [size for _, size in dealt(dealer(group_size=3), 25)] == [3] * 25
    config = make_config(group_size=1, algorithm={"advantage": "reinforce_pp"})
    assert (size_at(config, 5), groups_at(config, 5)) == (1, 2)


def test_prompts_come_in_the_order_of_their_stream():
    stream = PromptStream([make_prompt(i) for i in range(NUM_PROMPTS)], 0)
    order = [stream.next().prompt_id for _ in range(25)]
    assert [prompt_id for prompt_id, _ in dealt(dealer(), 25)] == order
    assert [prompt_id for prompt_id, _ in dealt(dealer(**ADAPTIVE), 25)] == order


def test_a_greedy_answer_comes_on_top():
    assert [size for _, size in dealt(dealer(greedy=True), 4)] == [3] * 4
    sizes = [size for _, size in dealt(dealer(greedy=True, **ADAPTIVE), 4)]
    assert sum(sizes) == 4 * 6 + 4


# ---- by difficulty


def test_prompts_without_a_signal_get_more_of_the_same_number_of_answers():
    d = dealer(**ADAPTIVE)
    epoch = dealt(d, NUM_PROMPTS)
    assert {size for _, size in epoch[:8]} == {6}, "nothing is known of any prompt: all are alike"
    easy = {prompt_id for prompt_id, _ in epoch[::2]}
    for prompt_id, _ in epoch:
        for _ in range(3):
            d.saw(prompt_id, has_signal=prompt_id in easy)
    dealt(d, 2)  # the rest of a block that was sized before
    for _ in range(10):
        block = dealt(d, 4)
        assert sum(size for _, size in block) == 24 and all(2 <= size <= 12 for _, size in block)
        sizes = {kind: [size for prompt_id, size in block if (prompt_id in easy) is kind] for kind in (True, False)}
        if all(sizes.values()):
            assert max(sizes[True]) < min(sizes[False])


def test_a_group_without_a_signal_changes_nothing():
    first, second = dealer(**ADAPTIVE), dealer(**ADAPTIVE)
    for prompt_id, _ in dealt(second, 8):
        second.saw(prompt_id, has_signal=False)
    dealt(first, 8)
    assert dealt(first, 20) == dealt(second, 20)


@pytest.mark.parametrize("num_before", [0, 1, 4, 7, 14])
def test_a_resumed_dealer_goes_on_in_the_middle_of_a_block(num_before: int):
    def go_on(d: Dealer, num: int) -> list[tuple[str, int]]:
        out = []
        for k in range(num):
            out += dealt(d, 1)
            d.saw(out[-1][0], has_signal=k % 3 == 0)
        return out

    d = dealer(**ADAPTIVE)
    go_on(d, num_before)
    again = resumed(d, **ADAPTIVE)
    rest = go_on(d, 60)
    assert go_on(again, 60) == rest and len({size for _, size in rest}) > 2


def test_a_change_of_the_way_loses_no_prompt_and_no_size():
    d = dealer(**ADAPTIVE)
    before = dealt(d, 6)
    fixed = resumed(d, group_size=3)
    after = dealt(fixed, 14)
    assert Counter(prompt_id for prompt_id, _ in before + after) == {f"p{i}": 2 for i in range(NUM_PROMPTS)}
    assert [size for _, size in after] == [6] * 2 + [3] * 12, "the block that was begun is dealt as it was sized"
    adaptive = resumed(fixed, **ADAPTIVE)
    assert [size for _, size in dealt(adaptive, 4)] == [6] * 4


@pytest.mark.parametrize("greedy", [False, True])
def test_what_is_left_of_a_block_is_dealt_with_a_greedy_answer_or_without_as_this_life_has_them(greedy: bool):
    d, plain = dealer(greedy=not greedy, **ADAPTIVE), dealer(**ADAPTIVE)
    dealt(d, 2)
    again = resumed(d, greedy=greedy, **ADAPTIVE)
    assert dealt(again, 20) == [(prompt_id, size + greedy) for prompt_id, size in dealt(plain, 22)[2:]]


def test_a_state_of_other_prompts_is_refused():
    with pytest.raises(PromptError, match="seed=0, not 1"):
        resumed(dealer(**ADAPTIVE), seed=1, **ADAPTIVE)


def test_a_schedule_remembers_nothing_of_prompts():
    d = dealer()
    d.saw("p1", has_signal=True)
    assert isinstance(sizes_of(make_config()), BySchedule) and d.state_dict()["sizes"] == {}


# ---- in the control plane


@pytest.mark.parametrize("advantage", ["grpo", "remax"])
def test_what_is_trained_on_tells_which_prompts_have_a_signal(advantage: str):
    """The last of three answers is the greedy one of remax, and tells nothing of how much the sampled ones differ."""
    greedy = advantage == "remax"
    sizes = {"group_size": 2, "adaptive_group_sizes": [2, 4]} if greedy else {"group_size": 3, "adaptive_group_sizes": [2, 4]}
    with Scene(make_config(algorithm={"advantage": advantage}, **sizes)) as scene:
        rollout = Rollout(scene, "a")
        first, second = scene.until("leases", lambda: len(rollout.leases) >= 2 and rollout.leases[:2])
        assert (first.num_samples, first.greedy) == (second.num_samples, second.greedy) == (3, greedy)
        rollout.deliver(first, [0], rewards=(1.0, 1.0, 0.0))
        rollout.deliver(second, [0], rewards=(0.0, 1.0, 1.0))
        batch = scene.until("batch", lambda: scene.ledger.take(0))
        with scene.control.changed:
            scene.control.trained(batch, 1)
            assert scene.ledger.version == 1 and scene.ledger.books()["groups"]["trained"] == 2
            state = scene.control.dealer.state_dict()
        seen = {second.prompt_id: 1} if greedy else {first.prompt_id: 1, second.prompt_id: 1}
        assert state["sizes"]["num_signals"] == seen
