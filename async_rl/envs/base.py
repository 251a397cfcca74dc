"""The interface between a rollout and the task it plays.

Owns: Env, the callables an environment is given, Scored, Item, TaskError. Imports types only.
Invariant: an environment returns the engine's token ids and log-probs as they came; text exists for rewards alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from async_rl.types import Completion, Prompt, Sampling, Trajectory

Generate = Callable[[np.ndarray, Sampling], Awaitable[Completion]]
"""(prompt ids int32 [P], sampling) -> completion."""


class Scored(NamedTuple):
    """What the reward says of one answer. `reward` is NaN when it could not be scored; `error` then says why."""

    reward: float
    error: str = ""
    scores: dict[str, float] = {}  # noqa: RUF012 (further figures by name; nobody changes it in place)


Score = Callable[[Prompt, str], Awaitable[Scored]]
"""(prompt, answer text) -> what it is worth."""

Decode = Callable[[np.ndarray], str]
"""ids int32 [T] -> text, special tokens skipped."""


class TaskError(Exception):
    """The task cannot be built as configured; one sentence that names the key and the fix."""


Message = dict[str, str]
"""{"role": ..., "content": ...}"""


@dataclass(frozen=True)
class Item:
    """A task instance before it is rendered: by a template over `shown`, or by the chat template if it has `messages`."""

    shown: dict[str, Any]  # what data.prompt may name
    fields: dict[str, Any]  # what the reward gets
    messages: tuple[Message, ...] = ()
    key: str = ""  # tells items apart and decides what is held out; empty: what it is rendered to
    flaw: str = ""  # why it cannot be used, one of tasks.REASONS
    where: str = ""  # file and line


class Env(Protocol):
    async def run(self, prompt: Prompt, sampling: Sampling, generate: Generate, score: Score, decode: Decode) -> Trajectory:
        """One answer to one prompt, scored. What goes wrong inside the task ends in `Trajectory.error`, not in a raise."""
        ...
