"""A reward that eats memory costs its own answer: the others, their scorers and the host go on."""

from __future__ import annotations

import asyncio
import math

import pytest

from async_rl.envs.base import Scored
from async_rl.envs.rewards import RewardError, RewardPool
from async_rl.learner.control.screen import EXCEPTION

from .test_rewards import HERE, pool, prompt


@pytest.mark.parametrize("kind", ["list", "array"])
def test_a_reward_that_eats_memory_costs_its_own_answer_and_leaves_no_core(kind: str) -> None:
    async def run(scorer: RewardPool) -> list[Scored]:
        answers = ["x", f"{kind} {1 << 30}", "x", "x", f"{kind} {1 << 20}", "core"]
        return await asyncio.gather(*(scorer.score(prompt(), answer) for answer in answers))

    with pool("eats", num_workers=2, timeout_s=60.0, memory_bytes=600 << 20) as scorer:
        scored = asyncio.run(run(scorer))
    error = f"reward {HERE}:eats was not scored: memory: it needs more than {600 << 20} bytes (rollout.reward_memory_bytes)"
    assert math.isnan(scored[1].reward) and scored[1].error == error
    assert [s for i, s in enumerate(scored) if i != 1] == [Scored(1.0)] * 4 + [Scored(0.0)]
    assert (found := EXCEPTION.search(error)) and found.group(1) == "memory", "the learner counts it by this word"


def test_a_reward_that_cannot_even_be_loaded_in_its_memory_says_which_key_to_raise() -> None:
    with pytest.raises(RewardError, match=r"needs more than \d+ bytes \(rollout.reward_memory_bytes\)"):
        RewardPool("tests.hungry_reward:reward", 1, 60.0, 600 << 20)
