"""Rejection: which trainable tokens, or whole trajectories, are too far from the policy to learn from. Imports torch only.

Each mask is bool [R], False at masked positions, and without gradient. Invariant: a mask takes tokens out of the loss, not
out of its denominator: the count before rejection stays, so that rejection shrinks a step instead of raising the rest.
A NaN is never a reason to drop a token, so the learner's finite guard sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from async_rl.algorithms._tensors import MAX_LOG_RATIO, check_aligned, clean, log_ratio
from async_rl.algorithms.sequences import sequence_mean, sequence_sum
from async_rl.algorithms.terms import Terms, check

STATISTICS = ("product", "geomean", "k3_mean", "min")


def sequence_statistic(terms: Terms, statistic: str) -> Tensor:
    """Of `rho = exp(logp_prox - logp_behav)` over each trajectory's trainable tokens, float64 [N]; that of rho = 1 without any.

    product, geomean, k3_mean `mean(rho - 1 - log rho)`, min; richardli.xyz/rl-collapse. Raises ValueError for another name.
    """
    mask_R, sequence_R, n = terms.mask_R, terms.sequence_R, terms.num_sequences
    log_R = log_ratio(terms.logp_prox_R, terms.logp_behav_R, mask_R).double()
    if statistic == "product":
        return sequence_sum(log_R, mask_R, sequence_R, n).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if statistic == "geomean":
        return sequence_mean(log_R, mask_R, sequence_R, n).exp()
    if statistic == "k3_mean":
        return sequence_mean(log_R.exp() - 1 - log_R, mask_R, sequence_R, n)
    if statistic == "min":
        nothing_N = torch.full((n,), torch.inf, dtype=torch.float64, device=log_R.device)
        lowest_N = nothing_N.scatter_reduce(0, sequence_R, torch.where(mask_R, log_R.exp(), torch.inf), "amin")
        return torch.where(lowest_N.isinf(), torch.ones_like(lowest_N), lowest_N)
    raise ValueError(f"unknown statistic {statistic!r}: one of {', '.join(STATISTICS)}")


def sequence_bounds(terms: Terms, *, statistic: str, low: float | None, high: float | None) -> Tensor:
    """Drops trajectories whose statistic of rho lies outside [low, high]; None: no such bound; bool [R].

    MIS, richardli.xyz/rl-collapse and arXiv:2512.23075. Bounds are of the statistic itself: a product of 1.5 is above 1.4
    (verl bounds its inverse). A product has a length trap, 1.1^100 = 13780. Raises ValueError when shapes differ, a
    constant carries gradient, or the statistic is unknown.
    """
    check(terms)
    value_N = sequence_statistic(terms, statistic)
    low, high = -torch.inf if low is None else low, torch.inf if high is None else high
    return terms.mask_R & ~((value_N < low) | (value_N > high))[terms.sequence_R]


def veto(terms: Terms, *, threshold: float) -> Tensor:
    """Drops trajectories with any token of `rho < threshold` (1e-6..1e-4): such a one was not sampled as we think; bool [R].

    verl, slime. Raises ValueError as `sequence_bounds` does.
    """
    return sequence_bounds(terms, statistic="min", low=threshold, high=None)


def icepop(terms: Terms, *, low: float, high: float) -> Tensor:
    """Drops tokens with `rho` outside [low, high] (.5, 5); bool [R]. IcePop, Ring-1T arXiv:2510.18855, arXiv:2512.16144.

    Raises ValueError when shapes differ or a constant carries gradient.
    """
    check(terms)
    ratio_R = log_ratio(terms.logp_prox_R, terms.logp_behav_R, terms.mask_R).exp()
    return terms.mask_R & ~((ratio_R < low) | (ratio_R > high))


def opsm(terms: Terms, *, delta: float) -> Tensor:
    """Drops trajectories with `A < 0` and `mean_t (logp_behav - logp) > delta` (.5); bool [R].

    Off-policy sequence masking, DeepSeek-V3.2 arXiv:2512.02556 eq. 9: with the current log-probs against mu, so that both
    engine mismatch and update count. A is the trajectory's mean advantage. Raises ValueError as `icepop` does.
    """
    check(terms)
    mask_R, sequence_R, n = terms.mask_R, terms.sequence_R, terms.num_sequences
    drift_R = clean(terms.logp_behav_R, mask_R) - clean(terms.logp_R.detach(), mask_R)
    far_N = sequence_mean(drift_R, mask_R, sequence_R, n) > delta
    negative_N = sequence_mean(terms.advantages_R, mask_R, sequence_R, n) < 0
    return mask_R & ~(far_N & negative_N)[sequence_R]


def m2po_squares(logp_R: Tensor, logp_behav_R: Tensor, advantages_R: Tensor, mask_R: Tensor, *, harmful_only: bool) -> Tensor:
    """`(log rho)^2` of the tokens that M2PO may drop, -1 at the others; detached, [R].

    `harmful_only`: those moved along with their advantage, {A > 0, rho > 1} and {A < 0, rho < 1}, as the authors' code
    has it; otherwise all trainable ones, as AReaL has it. Raises ValueError when shapes differ.
    """
    check_aligned(logp=logp_R, logp_behav=logp_behav_R, advantages=advantages_R, mask=mask_R)
    log_R = clean(logp_R.detach(), mask_R) - clean(logp_behav_R, mask_R)
    harmful_R = clean(advantages_R, mask_R).sign() * log_R.sign() > 0
    candidates_R = mask_R & harmful_R if harmful_only else mask_R
    return torch.where(candidates_R, log_R**2, torch.full_like(log_R, -1.0))


def m2po_threshold(squares_R: Tensor, *, tau: float) -> Tensor:
    """Largest square that stays when the largest are dropped until the mean of the rest is below `tau` (.04); 0-d float64.

    M2PO arXiv:2510.01161. `squares_R` are those of the whole batch, of all ranks: by micro-batch the result is another
    one. Negative entries are no candidates. -1 when not even the smallest may stay.
    """
    squares = squares_R[squares_R >= 0].double().sort().values
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    last_of_equals = torch.cat([squares[1:] != squares[:-1], squares.new_ones(1, dtype=torch.bool)[: len(squares)]])
    nothing = squares.new_full((1,), -1.0)
    return torch.cat([squares[(means < tau) & last_of_equals], nothing]).amax()


def m2po(terms: Terms, *, cut: Tensor) -> Tensor:
    """Drops the harmful tokens whose `(log rho_theta)^2` is above `cut`, the batch's `m2po_threshold`; bool [R].

    The authors' form, arXiv:2510.01161: `rho_theta = exp(logp - logp_behav)`. Raises ValueError as `icepop` does.
    """
    check(terms)
    squares_R = m2po_squares(terms.logp_R, terms.logp_behav_R, terms.advantages_R, terms.mask_R, harmful_only=True)
    return terms.mask_R & ~(squares_R > cut)


def m2po_all(terms: Terms, *, cut: Tensor) -> Tensor:
    """Drops any token whose `(log rho)^2` is above `cut`, with `rho = exp(logp_prox - logp_behav)`; bool [R].

    AReaL's variant, another algorithm than `m2po`. Raises ValueError as `icepop` does.
    """
    check(terms)
    squares_R = m2po_squares(terms.logp_prox_R, terms.logp_behav_R, terms.advantages_R, terms.mask_R, harmful_only=False)
    return terms.mask_R & ~(squares_R > cut)


MASKS: dict[str, Callable[..., Tensor]] = {
    "veto": veto,
    "icepop": icepop,
    "sequence_product": partial(sequence_bounds, statistic="product"),
    "sequence_geomean": partial(sequence_bounds, statistic="geomean"),
    "sequence_k3_mean": partial(sequence_bounds, statistic="k3_mean"),
    "opsm": opsm,
    "m2po": m2po,
    "m2po_all": m2po_all,
}
"""name -> function of (terms, options by keyword) that gives the tokens to keep, bool [R]."""
