"""Losses whose ratio is clipped: PPO by anchor, and GSPO. Imports torch only."""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms._tensors import clean, log_ratio
from async_rl.algorithms.sequences import sequence_mean
from async_rl.algorithms.terms import Terms, TokenLoss, check


def ppo(terms: Terms, *, eps_low: float, eps_high: float, dual_clip: float | None) -> TokenLoss:
    """`max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))`, `r = exp(logp - logp_prox)`, and for A < 0 at most `-c A`; [R].

    arXiv:1707.06347 eq. 7; asymmetric as in DAPO, arXiv:2503.14476; dual clip `c` arXiv:1912.09729. Right on-policy only:
    it ignores that mu sampled the tokens. Raises ValueError when shapes differ or a constant carries gradient.
    """
    check(terms)
    ratio_R = log_ratio(terms.logp_R, terms.logp_prox_R, terms.mask_R).exp()
    return _clipped(ratio_R, clean(terms.advantages_R, terms.mask_R), 1.0, eps_low, eps_high, dual_clip)


def bypass_ppo(terms: Terms, *, eps_low: float, eps_high: float, dual_clip: float | None) -> TokenLoss:
    """`ppo` with the behavior policy as its anchor: `r = exp(logp - logp_behav)`; [R].

    verl's bypass mode. It needs no proximal log-probs, and clips tokens that only look moved because the sampler was
    stale. Ignores the weight: r is the importance ratio already. Raises ValueError as `ppo` does.
    """
    check(terms)
    ratio_R = log_ratio(terms.logp_R, terms.logp_behav_R, terms.mask_R).exp()
    return _clipped(ratio_R, clean(terms.advantages_R, terms.mask_R), 1.0, eps_low, eps_high, dual_clip)


def decoupled_ppo(terms: Terms, *, eps_low: float, eps_high: float, dual_clip: float | None) -> TokenLoss:
    """`ppo` times the weight from the behavior to the proximal policy; [R].

    Decoupled PPO arXiv:2110.00641, arXiv:2505.24298. Raises ValueError as `ppo` does.
    """
    check(terms)
    ratio_R = log_ratio(terms.logp_R, terms.logp_prox_R, terms.mask_R).exp()
    advantages_R, weight_R = clean(terms.advantages_R, terms.mask_R), clean(terms.weight_R, terms.mask_R)
    return _clipped(ratio_R, advantages_R, weight_R, eps_low, eps_high, dual_clip)


def gspo(terms: Terms, *, eps_low: float, eps_high: float) -> TokenLoss:
    """`w max(-A s, -A clip(s, 1 - eps_low, 1 + eps_high))`, `s = exp(mean_t (logp - logp_prox))` of the trajectory; [R].

    GSPO arXiv:2507.18071, in its GSPO-token form: each token has the value of its trajectory and, unless clipped, the
    gradient `-w A s`, so under seq_mean_token_mean the loss is `mean_i l_i` and its gradient `-w A s / (N T)`. With
    advantages that differ by token it is GSPO-token. Weights should be of a whole sequence. Raises ValueError as `ppo` does.
    """
    check(terms)
    log_R = log_ratio(terms.logp_R.detach(), terms.logp_prox_R, terms.mask_R)
    ratio_N = sequence_mean(log_R, terms.mask_R, terms.sequence_R, terms.num_sequences).exp()
    logp_R = clean(terms.logp_R, terms.mask_R)
    ratio_R = ratio_N[terms.sequence_R].to(logp_R.dtype) * (logp_R - logp_R.detach()).exp()
    advantages_R, weight_R = clean(terms.advantages_R, terms.mask_R), clean(terms.weight_R, terms.mask_R)
    return _clipped(ratio_R, advantages_R, weight_R, eps_low, eps_high, None)


def _clipped(
    ratio_R: Tensor, advantages_R: Tensor, weight_R: Tensor | float, eps_low: float, eps_high: float, dual_clip: float | None
) -> TokenLoss:
    """max(-A r, -A clip(r)) is -A times the ratio, or times the bound it ran past; a bound has no gradient."""
    high_R = (advantages_R > 0) & (ratio_R > 1 + eps_high)
    low_R = (advantages_R < 0) & (ratio_R < 1 - eps_low)
    dual_R = (advantages_R < 0) & (ratio_R > (torch.inf if dual_clip is None else dual_clip))
    bounded_R = torch.where(high_R, 1 + eps_high, torch.where(low_R, 1 - eps_low, ratio_R))
    if dual_clip is not None:
        bounded_R = torch.where(dual_R, dual_clip, bounded_R)
    return TokenLoss(-weight_R * advantages_R * bounded_R, high_R, low_R, dual_R)
