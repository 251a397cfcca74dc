"""Losses `-c A logp` with a constant c, a capped ratio: no token ever loses its gradient to the cap. Imports torch only.

The flags of these say where the ratio met a bound. Aggregated values are no measure of progress; gradients are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms._tensors import clean, log_ratio
from async_rl.algorithms.sequences import sequence_sum
from async_rl.algorithms.terms import Terms, TokenLoss, check


def cispo(terms: Terms, *, low: float, high: float) -> TokenLoss:
    """`-w clip(r, low, high) A logp` with `r = exp(logp - logp_prox)` detached; bounds are ratios, not offsets from 1; [R].

    CISPO, MiniMax-M1 arXiv:2506.13585 eq. 4-5, with low = 0; ScaleRL arXiv:2510.13786 has high 4..8. The weight covers the
    way from mu to the proximal policy. Raises ValueError when shapes differ or a constant carries gradient.
    """
    check(terms)
    ratio_R = log_ratio(terms.logp_R.detach(), terms.logp_prox_R, terms.mask_R).exp()
    weight_R = clean(terms.weight_R, terms.mask_R) * ratio_R.clamp(low, high)
    return _reinforce(terms, weight_R, ratio_R > high, ratio_R < low)


def aipo(terms: Terms, *, delta: float) -> TokenLoss:
    """`-min(rho, delta) A logp` with `rho = exp(logp - logp_behav)` detached; [R].

    AIPO, LlamaRL arXiv:2505.24034, delta 2..10; REINFORCE with one-sided truncated importance sampling. Ignores the
    weight: rho is all of it. Raises ValueError as `cispo` does.
    """
    check(terms)
    ratio_R = log_ratio(terms.logp_R.detach(), terms.logp_behav_R, terms.mask_R).exp()
    return _reinforce(terms, ratio_R.clamp(max=delta), ratio_R > delta, torch.zeros_like(terms.mask_R))


def topr(terms: Terms) -> TokenLoss:
    """`-w A logp`, w = 1 where A >= 0, else `min(prod_t exp(logp - logp_behav), 1)` of the trajectory, detached; [R].

    TOPR, arXiv:2503.14286 eq. 8: under seq_mean_token_sum it is `-w R log pi(y)`. Its A is a reward minus a constant
    baseline (dr_grpo at most), not standardised. Ignores the weight. Raises ValueError as `cispo` does.
    """
    check(terms)
    log_R = log_ratio(terms.logp_R.detach(), terms.logp_behav_R, terms.mask_R)
    log_N = sequence_sum(log_R, terms.mask_R, terms.sequence_R, terms.num_sequences)
    negative_R = clean(terms.advantages_R, terms.mask_R) < 0
    ratio_R = log_N.clamp(max=0).exp()[terms.sequence_R].to(log_R.dtype)
    weight_R = torch.where(negative_R, ratio_R, torch.ones_like(ratio_R))
    return _reinforce(terms, weight_R, negative_R & (log_N > 0)[terms.sequence_R], torch.zeros_like(terms.mask_R))


def _reinforce(terms: Terms, weight_R: Tensor, high_R: Tensor, low_R: Tensor) -> TokenLoss:
    mask_R = terms.mask_R
    loss_R = -clean(weight_R, mask_R) * clean(terms.advantages_R, mask_R) * clean(terms.logp_R, mask_R)
    return TokenLoss(loss_R, high_R & mask_R, low_R & mask_R, torch.zeros_like(mask_R))
