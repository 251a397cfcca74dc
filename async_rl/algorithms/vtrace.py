"""V-trace: value targets and advantages for tokens of an older policy. Imports torch only.

Invariant: masked tokens are skipped as in `gae`, and with every ratio 1 the figures are those of `gae`. All float64,
without gradient. Computed once per batch, with the proximal policy; the fixed point lies between behavior and policy.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms._rows import Rows, backwards, capped, picked, rows, shifted, spread
from async_rl.algorithms._tensors import check_aligned, log_ratio
from async_rl.algorithms.gae import lam_per_token


class VTrace(NamedTuple):
    """Each float64 [R], 0 at masked positions."""

    targets: Tensor  # vs, what the critic regresses to
    pg_advantages: Tensor  # weighted by min(pg_rho_bar, rho): for a loss without a weight of its own
    advantages: Tensor  # unweighted: for a loss that multiplies by its own weight, or rho would count twice


@torch.no_grad()
def vtrace(
    logp_prox_R: Tensor,
    logp_behav_R: Tensor,
    rewards_R: Tensor,
    values_R: Tensor,
    mask_R: Tensor,
    sequence_R: Tensor,
    bootstrap_N: Tensor,
    *,
    gamma: float,
    lam: float | Tensor = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    pg_rho_bar: float = 1.0,
    dead_zone: float = 0.0,
    max_trace: float | None = None,
) -> VTrace:
    """`vs_t - V_t = min(rho_bar, rho_t) d_t + gamma c_t (vs_{t+1} - V_{t+1})` with `c_t = lam min(c_bar, rho_t)`.

    IMPALA, arXiv:1802.01561 eq. 1; lambda as in rlax. The other arguments are those of `gae`. With `c_bar=1` even the
    engine's rounding shortens traces (noise of .02 acts like lambda .99): take 1.05 .. 1.2 and bound all products of
    successive ratios by `max_trace`, or take ratios as 1 where |log rho| < `dead_zone`. Raises ValueError when shapes
    differ, unless `0 < c_bar <= rho_bar`, or when `max_trace` is below 1.
    """
    check_aligned(logp_prox=logp_prox_R, logp_behav=logp_behav_R, rewards=rewards_R, values=values_R, mask=mask_R)
    if not 0 < c_bar <= rho_bar:
        raise ValueError(f"c_bar is {c_bar}: it must be above 0 and at most rho_bar, {rho_bar}")
    at = rows(mask_R, sequence_R, len(bootstrap_N))
    log_rho_K = picked(log_ratio(logp_prox_R.double(), logp_behav_R.double(), mask_R), at)
    log_rho_K = torch.where(log_rho_K.abs() < dead_zone, 0.0, log_rho_K)
    rewards_K, values_K, lam_K = picked(rewards_R, at), picked(values_R, at), lam_per_token(lam, at)
    next_values_K = shifted(values_K, bootstrap_N, at)
    delta_K = log_rho_K.exp().clamp(max=rho_bar) * (rewards_K + gamma * next_values_K - values_K)
    excess_K = backwards(delta_K, gamma * lam_K * _traces(log_rho_K, c_bar, max_trace, at), at)
    next_excess_K = shifted(excess_K, torch.zeros_like(bootstrap_N), at)
    advantages_K = rewards_K + gamma * (next_values_K + lam_K * next_excess_K) - values_K
    weighted_K = log_rho_K.exp().clamp(max=pg_rho_bar) * advantages_K
    return VTrace(spread(values_K + excess_K, at), spread(weighted_K, at), spread(advantages_K, at))


def _traces(log_rho_K: Tensor, c_bar: float, max_trace: float | None, at: Rows) -> Tensor:
    """`min(c_bar, rho)`, [K], lowered where a product of them would pass `max_trace`."""
    log_c_K = log_rho_K.clamp(max=math.log(c_bar))
    if max_trace is None:
        return log_c_K.exp()
    if max_trace < 1:
        raise ValueError(f"max_trace is {max_trace}, but it bounds products of ratios: 1 or more")
    return capped(log_c_K, math.log(max_trace), at)
