"""The critic's maths: its loss, how much it explains, and a scale for its targets. Imports torch only.

Invariant: the loss and its gradient are 0 at masked positions; returns and old values are constants of the loss.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned, check_detached, clean

SIGMA_BOUNDS = (1e-4, 1e6)  # rlax's; below, a critic of a constant return would divide by nothing


class ValueLoss(NamedTuple):
    """Both [R]; `clipped` is bool: where the clipped error was the larger one, so that the gradient was cut."""

    loss: Tensor
    clipped: Tensor


def value_loss(values_R: Tensor, old_values_R: Tensor, returns_R: Tensor, mask_R: Tensor, *, clip: float | None) -> ValueLoss:
    """`max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2`; half the squared error alone when `clip` is None.

    The value loss of PPO's code (openai/baselines), arXiv:1707.06347. `old_values` are those before the batch's first update;
    `clip` is in units of the return. Raises ValueError when shapes differ or a constant carries gradient.
    """
    check_aligned(values=values_R, old_values=old_values_R, returns=returns_R, mask=mask_R)
    check_detached(old_values=old_values_R, returns=returns_R)
    values_R, old_R, returns_R = (clean(x, mask_R) for x in (values_R, old_values_R, returns_R))
    plain_R = (values_R - returns_R) ** 2
    if clip is None:
        return ValueLoss(plain_R / 2, torch.zeros_like(mask_R, dtype=torch.bool))
    bounded_R = (torch.clamp(values_R, old_R - clip, old_R + clip) - returns_R) ** 2
    clipped_R = bounded_R > plain_R
    return ValueLoss(torch.where(clipped_R, bounded_R, plain_R) / 2, clipped_R)


def explained_variance(returns_variance: float, residual_variance: float) -> float:
    """`1 - Var(R - V) / Var(R)`: 1 is a perfect critic, below 0 is worse than the mean; 0 when returns do not vary.

    From variances, which `diagnostics.value` gives as sums that ranks can add.
    """
    return 1 - residual_variance / returns_variance if returns_variance > 0 else 0.0


class PopArt(NamedTuple):
    """Running mean and mean square of the returns. A critic regresses `(R - mu) / sigma`; its value is `sigma n + mu`."""

    mu: float = 0.0
    nu: float = 1.0

    @property
    def sigma(self) -> float:
        return math.sqrt(min(max(self.nu - self.mu**2, SIGMA_BOUNDS[0] ** 2), SIGMA_BOUNDS[1] ** 2))


def popart_update(old: PopArt, moments_3: Tensor, *, beta: float) -> tuple[PopArt, float, float]:
    """`(new, scale, shift)`: with `w' = scale w` and `b' = scale b + shift` the critic's head says what it said before.

    PopArt, arXiv:1602.07714. `moments_3` are `whitening.moments` of the returns, over all ranks; without any, nothing moves.
    Every rank must rescale its shard of the head alike, before it regresses to the new scale.
    """
    count, total, square = moments_3.tolist()
    if not count:
        return old, 1.0, 0.0
    new = PopArt((1 - beta) * old.mu + beta * total / count, (1 - beta) * old.nu + beta * square / count)
    return new, old.sigma / new.sigma, (old.mu - new.mu) / new.sigma
