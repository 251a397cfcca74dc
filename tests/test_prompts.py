"""The prompt stream: order, epochs, resume, and what it refuses."""

from __future__ import annotations

import msgpack
import pytest

from async_rl.data.prompts import PromptError, PromptStream
from async_rl.types import Prompt
from tests.ledger_samples import make_prompt, packed


def prompts(num: int) -> list[Prompt]:
    return [make_prompt(i) for i in range(num)]


def draw(stream: PromptStream, num: int) -> list[str]:
    return [stream.next().prompt_id for _ in range(num)]


def reopened(stream: PromptStream, data: list[Prompt], seed: int = 7) -> PromptStream:
    fresh = PromptStream(data, seed)
    fresh.load_state_dict(msgpack.unpackb(packed(stream.state_dict())))
    return fresh


def test_every_epoch_is_another_permutation_that_follows_from_the_seed():
    stream = PromptStream(prompts(20), 7)
    epochs = [draw(stream, 20) for _ in range(3)]
    assert all(sorted(epoch) == sorted(f"p{i}" for i in range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = PromptStream(prompts(20), 7)
    assert [draw(again, 20) for _ in range(3)] == epochs
    assert draw(PromptStream(prompts(20), 8), 20) != epochs[0]


def test_the_epoch_counts_complete_passes():
    stream = PromptStream(prompts(3), 7)
    seen = []
    for _ in range(7):
        stream.next()
        seen.append((stream.epoch, stream.num_drawn))
    assert seen == [(0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (2, 6), (2, 7)]


@pytest.mark.parametrize("cuts", [(1,), (19,), (20,), (5, 20, 21, 39), tuple(range(1, 60))])
def test_restarts_do_not_change_the_order(cuts: tuple[int, ...]):
    whole = draw(PromptStream(prompts(20), 7), 60)
    stream, seen = PromptStream(prompts(20), 7), []
    for cut in (*cuts, 60):
        seen += draw(stream, cut - len(seen))
        stream = reopened(stream, prompts(20))
    assert seen == whole


def test_a_state_is_a_snapshot():
    stream = PromptStream(prompts(5), 7)
    state = stream.state_dict()
    expected = draw(stream, 7)
    stream.load_state_dict(state)
    assert draw(stream, 7) == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: [*data[1:], data[0]],
        lambda data: [Prompt(data[0].prompt_id, data[0].token_ids + 1, data[0].text, data[0].fields), *data[1:]],
        lambda data: [Prompt(data[0].prompt_id, data[0].token_ids, data[0].text, {"answer": "9"}), *data[1:]],
    ],
)
def test_other_data_is_refused_with_a_sentence_and_nothing_is_skipped(change):
    stream = PromptStream(prompts(5), 7)
    draw(stream, 2)
    with pytest.raises(PromptError, match=r"checkpoint was made with 5 prompts .* restore the seed, the `data` section"):
        reopened(stream, change(prompts(5)))


def test_another_seed_is_refused():
    with pytest.raises(PromptError, match="seed=7, not 8"):
        reopened(PromptStream(prompts(5), 7), prompts(5), seed=8)


def test_no_prompts_is_an_error_that_names_the_keys():
    with pytest.raises(PromptError, match=r"data\.num_items"):
        PromptStream([], 7)


def test_a_single_prompt_comes_for_ever():
    assert draw(PromptStream(prompts(1), 7), 4) == ["p0"] * 4
