"""The interface between a rollout and the task it plays.

Owns: Env, the callables an environment is given, Item, TaskError. Imports types only.
Invariant: an environment returns the engine's token ids and log-probs as they came; text exists for rewards alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from async_rl.types import Completion, Prompt, Sampling, Trajectory

Generate = Callable[[np.ndarray, Sampling], Awaitable[Completion]]
"""(prompt ids int32 [P], sampling) -> completion."""

Score = Callable[[Prompt, str], Awaitable[tuple[float, str]]]
"""(prompt, answer text) -> (reward, ""), or (NaN, why it could not be scored)."""

Decode = Callable[[np.ndarray], str]
"""ids int32 [T] -> text, special tokens skipped."""


class TaskError(Exception):
    """The task cannot be built as configured; one sentence that names the key and the fix."""


@dataclass(frozen=True)
class Item:
    """A task instance before it is rendered. `answer` is the gold answer, empty when the source has none."""

    question: str
    answer: str
    off_options: bool = False  # the source gave something else than its options ask for


class Env(Protocol):
    async def run(self, prompt: Prompt, sampling: Sampling, generate: Generate, score: Score, decode: Decode) -> Trajectory:
        """One answer to one prompt, scored. What goes wrong inside the task ends in `Trajectory.error`, not in a raise."""
        ...
