"""One prompt, one answer, one reward.

Imports types and envs/base. Invariant: only an answer that ended by itself or by its length is scored (BR-037); the
trajectory holds the engine's ids unchanged, the stop token included (BR-027, BR-030).
"""

from __future__ import annotations

import math

import numpy as np

from async_rl.envs.base import Decode, Generate, Score, Scored
from async_rl.types import Completion, Prompt, Sampling, Trajectory


class SingleTurn:
    async def run(self, prompt: Prompt, sampling: Sampling, generate: Generate, score: Score, decode: Decode) -> Trajectory:
        """Generate once, score the text. An answer that cannot be scored keeps its tokens, with reward NaN and an error."""
        completion = await generate(prompt.token_ids, sampling)
        error = _unscorable(completion)
        scored = Scored(math.nan, error) if error else await score(prompt, decode(completion.token_ids))
        return Trajectory(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            incarnations=completion.incarnations,
            versions=completion.versions,
            mask=np.ones(len(completion.token_ids), dtype=np.bool_),
            finish_reason=completion.finish_reason,
            reward=scored.reward,
            error=scored.error,
            scores=scored.scores,
        )


def _unscorable(completion: Completion) -> str:
    if completion.finish_reason not in ("stop", "length"):
        return f"the engine ended the answer with '{completion.finish_reason}' after {len(completion.token_ids)} tokens"
    if len(completion.token_ids) == 0:
        return "the engine returned no tokens"
    return ""
