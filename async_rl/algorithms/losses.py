"""Per-token policy losses, to be minimised. Imports torch only.

Invariant: the loss and its gradient are exactly 0 at masked positions; weights and advantages are constants of the loss.
A NaN at a trainable token stays NaN, so that the learner's finite guard sees it.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned, check_detached, clean, log_ratio


class TokenLoss(NamedTuple):
    """A loss per token and where its gradient was cut; every tensor is [R], the flags are bool."""

    loss: Tensor
    clipped_high: Tensor
    clipped_low: Tensor
    dual_clipped: Tensor


def decoupled_ppo(
    logp_R: Tensor,
    logp_prox_R: Tensor,
    weight_R: Tensor,
    advantages_R: Tensor,
    mask_R: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
) -> TokenLoss:
    """`w * max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))` with `r = exp(logp - logp_prox)`, and for A < 0 at most `-c A`.

    Decoupled PPO arXiv:2110.00641, arXiv:2505.24298; the clip arXiv:1707.06347 eq. 7, asymmetric as in arXiv:2503.14476;
    dual clip `c` arXiv:1912.09729. Raises ValueError when shapes differ or a constant carries gradient.
    """
    check_aligned(logp=logp_R, logp_prox=logp_prox_R, weight=weight_R, advantages=advantages_R, mask=mask_R)
    check_detached(logp_prox=logp_prox_R, weight=weight_R, advantages=advantages_R)
    ratio_R = log_ratio(logp_R, logp_prox_R, mask_R).exp()
    advantages_R, weight_R = clean(advantages_R, mask_R), clean(weight_R, mask_R)
    high_R = (advantages_R > 0) & (ratio_R > 1 + eps_high)
    low_R = (advantages_R < 0) & (ratio_R < 1 - eps_low)
    dual_R = (advantages_R < 0) & (ratio_R > (torch.inf if dual_clip is None else dual_clip))
    # max(-A r, -A clip(r)) is -A times the ratio, or times the bound it ran past; a bound has no gradient.
    bounded_R = torch.where(high_R, 1 + eps_high, torch.where(low_R, 1 - eps_low, ratio_R))
    if dual_clip is not None:
        bounded_R = torch.where(dual_R, dual_clip, bounded_R)
    return TokenLoss(-weight_R * advantages_R * bounded_R, high_R, low_R, dual_R)


class Loss(Protocol):
    """A policy loss. The learner passes all of AlgorithmConfig's clip bounds by name; a loss uses those it knows."""

    def __call__(
        self,
        logp_R: Tensor,
        logp_prox_R: Tensor,
        weight_R: Tensor,
        advantages_R: Tensor,
        mask_R: Tensor,
        *,
        eps_low: float,
        eps_high: float,
        dual_clip: float | None,
    ) -> TokenLoss: ...


LOSSES: dict[str, Loss] = {"decoupled_ppo": decoupled_ppo}
