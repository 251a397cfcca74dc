"""Losses that hold the policy near the behavior policy by a gate or a penalty instead of a clip. Imports torch only.

All of them look at mu directly and ignore the weight, which would count staleness twice. A penalty is taken of the
log-ratio as it is, not clamped: the further a token has gone, the harder it is pulled back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms._tensors import clean, log_ratio
from async_rl.algorithms.aggregation import num_tokens_per_sequence
from async_rl.algorithms.sequences import sequence_mean, sequence_sum
from async_rl.algorithms.terms import Terms, TokenLoss, check


def sapo(terms: Terms, *, tau_pos: float, tau_neg: float) -> TokenLoss:
    """`-A (4 / tau) sigmoid(tau (rho - 1))` with `rho = exp(logp - logp_behav)`, tau by the sign of A; [R].

    SAPO arXiv:2511.20347 (1.0 and 1.05): the gradient fades smoothly on both sides of rho = 1, where it is -A. Nothing is
    flagged. Raises ValueError when shapes differ or a constant carries gradient.
    """
    check(terms)
    ratio_R = log_ratio(terms.logp_R, terms.logp_behav_R, terms.mask_R).exp()
    advantages_R = clean(terms.advantages_R, terms.mask_R)
    tau_R = torch.full_like(advantages_R, tau_neg).masked_fill(advantages_R > 0, tau_pos)
    return _unflagged(-advantages_R * (4 / tau_R) * torch.sigmoid(tau_R * (ratio_R - 1)))


def dppo_tv(terms: Terms, *, tv_high: float, tv_low: float, kl_tau: float) -> TokenLoss:
    """`-A rho + kl_tau (log rho)^2`, the first part only where the probability has not moved too far with A; [R].

    `rho = exp(logp - logp_behav)`; dropped where A > 0 and `pi - mu > tv_high`, or A <= 0 and `pi - mu < -tv_low`. DPPO
    arXiv:2602.04879 with the penalty of Kimi K2.5, arXiv:2602.02276, as in prime-rl (.2, .2, 1e-3). A distance of
    probabilities keeps rare tokens, whose ratios are large by nature. Raises ValueError as `sapo` does.
    """
    check(terms)
    mask_R, advantages_R = terms.mask_R, clean(terms.advantages_R, terms.mask_R)
    logp_R, behav_R = clean(terms.logp_R, mask_R), clean(terms.logp_behav_R, mask_R)
    moved_R = logp_R.detach().clamp(max=0).exp() - behav_R.clamp(max=0).exp()
    high_R = (advantages_R > 0) & (moved_R > tv_high)
    low_R = (advantages_R <= 0) & (moved_R < -tv_low)
    gain_R = advantages_R * log_ratio(logp_R, behav_R, mask_R).exp()
    loss_R = kl_tau * (logp_R - behav_R) ** 2 - torch.where(high_R | low_R, torch.zeros_like(gain_R), gain_R)
    return TokenLoss(loss_R, high_R, low_R, torch.zeros_like(mask_R))


def kimi_k15(terms: Terms, *, tau: float) -> TokenLoss:
    """`-A log pi(y) + (tau / 2) D^2` with `D = sum_t (logp - logp_behav)` of the trajectory; [R].

    Kimi k1.5 arXiv:2501.12599 eq. 3, under seq_mean_token_sum; under seq_mean_token_mean it is OpenKimi's, over T. A is the
    reward minus the group's mean (dr_grpo). A token's share of the square is `(tau / 2) D d_t`, its gradient `tau D`.
    Raises ValueError as `sapo` does.
    """
    check(terms)
    logp_R = clean(terms.logp_R, terms.mask_R)
    log_R = logp_R - clean(terms.logp_behav_R, terms.mask_R)
    square_R = tau * _of_sequence(log_R, terms) * (log_R - log_R.detach() / 2)
    return _unflagged(square_R - clean(terms.advantages_R, terms.mask_R) * logp_R)


def kimi_pmd(terms: Terms, *, tau: float) -> TokenLoss:
    """`(A - tau D)^2 / (2 tau)` of the trajectory, D as in `kimi_k15`, whose gradient `-(A - tau D)` it shares; [R].

    Kimi K2 arXiv:2507.20534, under seq_mean_token_sum. The value is spread evenly over the trainable tokens; A is the
    mean advantage of the trajectory. Raises ValueError as `sapo` does.
    """
    check(terms)
    mask_R, sequence_R, n = terms.mask_R, terms.sequence_R, terms.num_sequences
    log_R = clean(terms.logp_R, mask_R) - clean(terms.logp_behav_R, mask_R)
    advantage_R = sequence_mean(terms.advantages_R, mask_R, sequence_R, n)[sequence_R].to(log_R.dtype)
    num_tokens_R = num_tokens_per_sequence(mask_R, sequence_R, n).clamp(min=1)[sequence_R]
    gap_R = advantage_R - tau * _of_sequence(log_R, terms)
    return _unflagged(clean(gap_R**2 / num_tokens_R / (2 * tau) - gap_R * (log_R - log_R.detach()), mask_R))


def _of_sequence(log_R: Tensor, terms: Terms) -> Tensor:
    """The sum over the trajectory, at each of its tokens; detached."""
    total_N = sequence_sum(log_R.detach(), terms.mask_R, terms.sequence_R, terms.num_sequences)
    return total_N[terms.sequence_R].to(log_R.dtype)


def _unflagged(loss_R: Tensor) -> TokenLoss:
    nowhere_R = torch.zeros_like(loss_R, dtype=torch.bool)
    return TokenLoss(loss_R, nowhere_R, nowhere_R, nowhere_R)
