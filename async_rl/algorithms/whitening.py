"""Whitening over all tokens of a batch, from moments that ranks can add. Imports torch only.

Invariant: masked positions enter no moment and come out as 0; a batch without variance comes out as exactly 0.
Moments and results are float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned, clean
from async_rl.algorithms.filters import ZERO_STD

RELATIVE_VARIANCE = 1e-14  # of the mean square; what a difference of two large sums may leave of an equal batch


def moments(x_R: Tensor, mask_R: Tensor) -> Tensor:
    """float64 [3]: count, sum and sum of squares of what is not masked. Add them over ranks before they are used."""
    check_aligned(x=x_R, mask=mask_R)
    x_R = clean(x_R.double(), mask_R)
    return torch.stack([mask_R.double().sum(), x_R.sum(), (x_R**2).sum()])


def mean_and_variance(moments_3: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """0-d float64 each, of `moments`; 0 and 0 of nothing, and a variance of exactly 0 where rounding alone makes one."""
    count, total, square = moments_3.double()
    mean = total / count.clamp(min=1)
    mean_square = square / count.clamp(min=1)
    variance = (square - total * mean).clamp(min=0) / (count - ddof).clamp(min=1)
    return mean, torch.where(variance < ZERO_STD**2 + RELATIVE_VARIANCE * mean_square, 0.0, variance)


@torch.no_grad()
def whiten(x_R: Tensor, mask_R: Tensor, moments_3: Tensor | None = None, *, ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """`(x - mean) / sqrt(var + eps)`, float64 [R], with the moments of the whole batch (default: those of x alone).

    Giving each rank its own moments makes the loss depend on how the batch was dealt. Raises ValueError when shapes differ.
    """
    mean, variance = mean_and_variance(moments(x_R, mask_R) if moments_3 is None else moments_3, ddof)
    whitened_R = (x_R.double() - mean) / (variance + eps).sqrt()
    return clean(torch.where(variance == 0, x_R.double() * 0, whitened_R), mask_R)


@torch.no_grad()
def blend(grpo_R: Tensor, gae_R: Tensor, mask_R: Tensor, ppo_weight: float, moments_23: Tensor | None = None) -> Tensor:
    """`(1 - a) grpo / std + a gae / std`, float64 [R]: advantages on the way from GRPO to PPO, each of unit std first.

    `moments_23` stacks the `moments` of both over all ranks (default: of these tokens alone). One without variance adds 0.
    Each keeps its mean, which whitening would take away. See `schedules.hybrid_at` for the weight.
    """
    check_aligned(grpo=grpo_R, gae=gae_R, mask=mask_R)
    if moments_23 is None:
        moments_23 = torch.stack([moments(grpo_R, mask_R), moments(gae_R, mask_R)])
    parts = []
    for x_R, moments_3 in zip((grpo_R, gae_R), moments_23, strict=True):
        _, variance = mean_and_variance(moments_3, ddof=1)
        parts.append(clean(x_R.double(), mask_R) * torch.where(variance > 0, variance.rsqrt(), 0.0))
    return (1 - ppo_weight) * parts[0] + ppo_weight * parts[1]
