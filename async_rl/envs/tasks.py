"""From a data configuration to prompts: draw, split, render, tokenize, drop what cannot be used.

Owns: the held-out rule. Imports config, types, envs/text and the adapters; no torch.
Invariant: whether a question is held out depends on the question alone, so no seed, no item count and no resume moves
it to the other side.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

from async_rl.config import Config
from async_rl.envs.adapters.reasoning_gym import load_items
from async_rl.envs.base import Item, TaskError
from async_rl.envs.text import encode_prompt
from async_rl.types import Prompt

NOISE = re.compile(r"[A-Za-z_]+|\s+|[?!:;,'\"]|\.(?!\d)")


class Tasks(NamedTuple):
    """`dropped` counts items by reason: off_options, repeated, unscorable (no gold answer), too_long."""

    train: list[Prompt]
    heldout: list[Prompt]
    dropped: dict[str, int]


def is_heldout(question: str, fraction: float) -> bool:
    """True for `fraction` of all questions, by their md5."""
    return int(hashlib.md5(question.encode(), usedforsecurity=False).hexdigest(), 16) % 1000 < fraction * 1000


def expression_of(question: str) -> str:
    """The question without words, spaces and punctuation: "Calculate 47 + 38." -> "47+38"."""
    return NOISE.sub("", question)


def build_prompts(config: Config, tokenizer: Any) -> Tasks:
    """All prompts of a run, in the generator's order.

    A prompt that leaves no room for `rollout.max_new_tokens` within `model.max_model_len` is dropped as too_long (BR-073).
    Raises TaskError when the dataset is unknown, the options are wrong, or a side that is needed stays empty.
    """
    tasks = Tasks([], [], {"off_options": 0, "repeated": 0, "unscorable": 0, "too_long": 0})
    room_tokens = config.model.max_model_len - config.rollout.max_new_tokens
    seen: set[str] = set()
    for item in load_items(config.data, config.seed):
        if item.off_options:
            tasks.dropped["off_options"] += 1
            continue
        text = _render(config.data.prompt or "{question}", item)
        if text in seen:
            tasks.dropped["repeated"] += 1
            continue
        seen.add(text)
        if not item.answer.strip():
            tasks.dropped["unscorable"] += 1
            continue
        token_ids = encode_prompt(tokenizer, text, config.data.chat)
        if len(token_ids) > room_tokens:
            tasks.dropped["too_long"] += 1
            continue
        name = hashlib.md5(item.question.encode(), usedforsecurity=False).hexdigest()[:12]
        prompt = Prompt(f"{config.data.dataset}-{name}", token_ids, text, {"target": item.answer, "question": item.question})
        side = tasks.heldout if is_heldout(item.question, config.data.heldout_fraction) else tasks.train
        side.append(prompt)
    _check_sides(config, tasks)
    return tasks


def _render(template: str, item: Item) -> str:
    try:
        return template.format(question=item.question, expression=expression_of(item.question))
    except (KeyError, IndexError, ValueError, AttributeError) as e:
        raise TaskError(
            f"data.prompt is '{template}', which cannot be filled ({type(e).__name__}: {e}): "
            "use {question} or {expression}, and {{ }} for literal braces"
        ) from e


def _check_sides(config: Config, tasks: Tasks) -> None:
    counts = ", ".join(f"{n} {reason}" for reason, n in tasks.dropped.items())
    if not tasks.train:
        raise TaskError(
            f"no training prompt is left of data.num_items={config.data.num_items} ({counts}; {len(tasks.heldout)} held out): "
            "raise model.max_model_len, lower rollout.max_new_tokens or data.heldout_fraction, or draw more items"
        )
    if config.eval.draws > 0 and not tasks.heldout:
        raise TaskError(
            f"eval.draws is {config.eval.draws}, but no prompt is held out of {len(tasks.train)} ({counts}): "
            f"raise data.heldout_fraction={config.data.heldout_fraction} or data.num_items, or set eval.draws=0"
        )
