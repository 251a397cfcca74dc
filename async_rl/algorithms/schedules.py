"""Schedules over learner steps: pure functions of a step number. Imports the standard library only.

Invariant: indexed by the optimizer step they apply to, counted from 0, so a resumed run continues exactly where it was.
"""

from __future__ import annotations

import math


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
