"""Schedules over learner steps: pure functions of a step number, or of what it saw. Imports the standard library only.

Invariant: indexed by the optimizer step they apply to, counted from 0, so a resumed run continues exactly where it was.
"""

from __future__ import annotations

import heapq
import math
from typing import Literal, NamedTuple


def lr_at(step: int, total_steps: int, peak: float, warmup_fraction: float, hold_fraction: float, min_ratio: float) -> float:
    """Learning rate: linear warm-up to `peak`, cosine to `min_ratio * peak`, held there at the end and beyond.

    With T = total_steps, W = max(1, round(warmup * T)), H = round((1 - hold) * T): `peak (t+1)/W` below W, then
    `peak (m + (1-m) (1 + cos(pi (t-W)/(H-W))) / 2)` below H, then `peak m`. (t+1)/W because a step at rate 0 is a wasted one.
    """
    warmup_end = max(1, round(warmup_fraction * total_steps))
    hold_start = max(warmup_end, round((1 - hold_fraction) * total_steps))
    if step < warmup_end:
        return peak * (step + 1) / warmup_end
    if step >= hold_start:
        return peak * min_ratio
    progress = (step - warmup_end) / (hold_start - warmup_end)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


class Hybrid(NamedTuple):
    """What a step on the way from GRPO to PPO uses: `whitening.blend` takes the weight, the policy loss the clip range."""

    phase: Literal["grpo", "blend", "ppo"]
    ppo_weight: float
    clip: float


def hybrid_at(
    step: int,
    total_steps: int,
    *,
    grpo_end: float = 0.2,
    ppo_start: float = 0.7,
    clip_grpo: float = 0.2,
    clip_start: float = 0.3,
    clip_end: float = 0.2,
) -> Hybrid:
    """GRPO up to the fraction `grpo_end` of the steps, PPO from `ppo_start`; between them weight and clip go in straight lines.

    With x = step / total_steps the weight is `a = clip((x - grpo_end) / (ppo_start - grpo_end), 0, 1)`. The critic must be
    trained from step 0: one that starts at `grpo_end` has nothing to say yet. Raises ValueError unless grpo_end < ppo_start.
    """
    if grpo_end >= ppo_start:
        raise ValueError(f"grpo_end is {grpo_end}: it must be below ppo_start, {ppo_start}")
    x = step / max(1, total_steps)
    if x < grpo_end:
        return Hybrid("grpo", 0.0, clip_grpo)
    weight = min(1.0, (x - grpo_end) / (ppo_start - grpo_end))
    return Hybrid("blend" if x < ppo_start else "ppo", weight, clip_start + (clip_end - clip_start) * weight)


def group_size_at(step: int, total_steps: int, start: int, end: int) -> int:
    """Answers per prompt: from `start` to `end`, up or down, by doubling or halving, each size for as many steps.

    4 to 16 is 4, 8, 16, each for a third. Prompts per batch must change inversely (`num_prompts`), so that the batch does
    not. Raises ValueError when one is not a power of two times the other, or either below 2.
    """
    ratio = max(start, end) // max(1, min(start, end))
    if min(start, end) < 2 or max(start, end) != ratio * min(start, end) or ratio & (ratio - 1):
        raise ValueError(f"group sizes {start} and {end}: 2 or more, and one a power of two times the other")
    doublings = ratio.bit_length() - 1
    stage = min(doublings, step * (doublings + 1) // max(1, total_steps))
    return start << stage if end >= start else start >> stage


def num_prompts(num_answers: int, group_size: int) -> int:
    """Prompts of a batch of `num_answers`, whatever the group size. Raises ValueError when they do not divide it."""
    if num_answers % group_size:
        raise ValueError(f"a batch of {num_answers} answers cannot be dealt to groups of {group_size}")
    return num_answers // group_size


def allocate_answers(num_signals_P: list[int], num_answers: int, smallest: int, largest: int) -> list[int]:
    """How many answers each of P prompts gets of a fixed budget: more where its groups carried a signal less often.

    `num_signals_P` counts the groups of each prompt that had reward variance. Beyond `smallest` each, the next answer goes
    to the largest `1 / ((1 + signals) (answers + 1))`, the first of equals (D'Hondt's rule): sizes are as 1 / (1 + signals)
    within the bounds, and a prompt with fewer signals never gets less. Raises ValueError when the bounds do not admit the
    budget.
    """
    num_prompts = len(num_signals_P)
    if not 0 < smallest <= largest or not smallest * num_prompts <= num_answers <= largest * num_prompts:
        raise ValueError(f"{num_answers} answers cannot be dealt to {num_prompts} prompts with {smallest} to {largest} each")
    sizes = [smallest] * num_prompts
    waiting = [((1 + signals) * (smallest + 1), k) for k, signals in enumerate(num_signals_P) if smallest < largest]
    heapq.heapify(waiting)
    for _ in range(num_answers - smallest * num_prompts):
        _, k = heapq.heappop(waiting)
        sizes[k] += 1
        if sizes[k] < largest:
            heapq.heappush(waiting, ((1 + num_signals_P[k]) * (sizes[k] + 1), k))
    return sizes


def vcpo_lr_scale(ess: float) -> float:
    """`sqrt(ESS / B)`, what the learning rate is multiplied by; VCPO, arXiv:2602.17616.

    `ess` is the effective share of the sequences, 0 to 1, as `diagnostics.ess` gives it for sequence weights.
    """
    return math.sqrt(min(max(ess, 0.0), 1.0))
