"""One prompt, one answer: what is kept, what is scored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from async_rl.envs.base import Scored
from async_rl.envs.single_turn import SingleTurn
from async_rl.types import Completion, Prompt, Sampling, Trajectory

PROMPT = Prompt("p", np.array([1, 9], dtype=np.int32), "hi", {"target": "hello"})
ONE = Scored(1.0)
TEXT = {5: "he", 6: "llo", 2: ""}


def completion(ids: list[int], finish_reason: Any) -> Completion:
    n = len(ids)
    return Completion(
        prompt_ids=PROMPT.token_ids,
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=-np.arange(n, dtype=np.float32),
        incarnations=np.ones(n, dtype=np.int32),
        versions=np.arange(n, dtype=np.int32),
        finish_reason=finish_reason,
    )


async def play(answer: Completion, scored: Scored = ONE) -> tuple[Trajectory, list[str]]:
    asked: list[str] = []

    async def generate(ids: np.ndarray, sampling: Sampling) -> Completion:
        assert ids is PROMPT.token_ids
        return answer

    async def score(prompt: Prompt, text: str) -> Scored:
        asked.append(text)
        return scored

    def decode(ids: np.ndarray) -> str:
        return "".join(TEXT[i] for i in ids.tolist())

    return await SingleTurn().run(PROMPT, Sampling(8, 1.0), generate, score, decode), asked


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
async def test_the_trajectory_holds_the_engines_ids_and_the_reward_of_their_text(finish_reason: str) -> None:
    answer = completion([5, 6, 2], finish_reason)
    trajectory, asked = await play(answer)
    assert asked == ["hello"]
    assert trajectory.token_ids.tolist() == [5, 6, 2]
    assert trajectory.logprobs is answer.logprobs
    assert trajectory.versions is answer.versions
    assert trajectory.mask.tolist() == [True] * 3
    assert (trajectory.reward, trajectory.error, trajectory.finish_reason) == (1.0, "", finish_reason)


async def test_an_answer_that_is_only_the_stop_token_is_scored() -> None:
    trajectory, asked = await play(completion([2], "stop"), Scored(0.0, "", {"format": 0.5}))
    assert asked == [""]
    assert (trajectory.num_tokens, trajectory.reward, trajectory.scores) == (1, 0.0, {"format": 0.5})


@pytest.mark.parametrize(
    ("ids", "finish_reason", "says"),
    [([5, 6], "abort", "'abort' after 2 tokens"), ([], "error", "'error'"), ([], "stop", "no tokens"), ([5], None, "None")],
)
async def test_an_answer_that_did_not_end_by_itself_is_never_scored(ids: list[int], finish_reason: Any, says: str) -> None:
    trajectory, asked = await play(completion(ids, finish_reason))
    assert asked == []
    assert math.isnan(trajectory.reward)
    assert says in trajectory.error
    assert trajectory.token_ids.tolist() == ids


async def test_the_reason_of_an_unscorable_answer_travels_with_it() -> None:
    trajectory, _ = await play(completion([5], "stop"), Scored(math.nan, "reward f raised"))
    assert math.isnan(trajectory.reward)
    assert trajectory.error == "reward f raised"
