"""What a run reports about its own update: mismatch, weights, clipping, lag, lengths, groups.

Imports torch and numpy. Per-token figures come as (sum, count) pairs and maxima, so that they merge over micro-batches
and ranks; nothing here is a mean of means. Sums are float64. Invariant: masked positions change nothing, and no figure
divides by zero: an empty input gives counts of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned, log_ratio
from async_rl.algorithms.filters import zero_variance
from async_rl.algorithms.losses import TokenLoss


@dataclass(frozen=True)
class Stats:
    """Mergeable figures: name -> (sum, count), and name -> largest; 0-d tensors on the device of the input."""

    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)


def _sum(x_R: Tensor, mask_R: Tensor) -> tuple[Tensor, Tensor]:
    x_R = torch.where(mask_R, x_R.double(), torch.zeros((), dtype=torch.float64, device=x_R.device))
    return x_R.sum(), mask_R.sum()


def _max(x_R: Tensor, mask_R: Tensor) -> Tensor:
    """-inf when nothing is unmasked; NaN when an unmasked entry is NaN."""
    low = torch.full((1,), -torch.inf, dtype=torch.float64, device=x_R.device)
    return torch.cat([torch.where(mask_R, x_R.double(), low), low]).max()


def mismatch(logp_R: Tensor, logp_behav_R: Tensor, mask_R: Tensor, suffix: str = "") -> Stats:
    """Learner against behavior log-probs, `rho = exp(logp - logp_behav)`: KL(behavior || learner) and kin.

    k1 `-ln rho`, k3 `rho - 1 - ln rho`, abs `|ln rho|`, mult_prob_err `exp|ln rho|`, chi2 `rho^2 - 1`. Restricted to lag 0
    (suffix "_lag0") it isolates the engine's numerics from staleness: 1e-4..1e-3 in k3 is normal, above 1e-2 a bug.
    """
    check_aligned(logp=logp_R, logp_behav=logp_behav_R, mask=mask_R)
    log_R = log_ratio(logp_R.detach().double(), logp_behav_R.double(), mask_R)
    rho_R = log_R.exp()
    figures = {
        "k1": -log_R,
        "k3": rho_R - 1 - log_R,
        "abs": log_R.abs(),
        "mult_prob_err": log_R.abs().exp(),
        "chi2": rho_R**2 - 1,
    }
    means = {f"mismatch/{name}{suffix}": _sum(x_R, mask_R) for name, x_R in figures.items()}
    return Stats(means, {f"mismatch/abs_max{suffix}": _max(log_R.abs(), mask_R)})


def correction(logp_prox_R: Tensor, logp_behav_R: Tensor, weight_R: Tensor, mask_R: Tensor) -> Stats:
    """Of the untruncated ratio rho and of the weight that is used: means, second moments, share cut at the cap, extremes.

    `ess` of the reduced moments is the effective sample size; the mean of rho should be near 1 (1 +- .02).
    """
    check_aligned(logp_prox=logp_prox_R, logp_behav=logp_behav_R, weight=weight_R, mask=mask_R)
    rho_R = log_ratio(logp_prox_R.detach().double(), logp_behav_R.double(), mask_R).exp()
    means = {
        "is/ratio_mean": _sum(rho_R, mask_R),
        "is/ratio_sq_mean": _sum(rho_R**2, mask_R),
        "is/weight_mean": _sum(weight_R, mask_R),
        "is/weight_sq_mean": _sum(weight_R.double() ** 2, mask_R),
        "is/trunc_frac_high": _sum(rho_R > weight_R.double() * (1 + 1e-5), mask_R),
    }
    return Stats(means, {"is/ratio_max": _max(rho_R, mask_R)})


def clipping(token_loss: TokenLoss, logp_R: Tensor, logp_prox_R: Tensor, mask_R: Tensor) -> Stats:
    """Share of trainable tokens whose gradient was cut, by cause, and the largest |log r| of the update so far.

    Before the first optimizer step of a batch that largest |log r| must be 0: proximal and policy are the same weights.
    """
    check_aligned(logp=logp_R, logp_prox=logp_prox_R, mask=mask_R, clipped_high=token_loss.clipped_high)
    means = {
        "ppo/clipfrac_high": _sum(token_loss.clipped_high, mask_R),
        "ppo/clipfrac_low": _sum(token_loss.clipped_low, mask_R),
        "ppo/clipfrac_dual": _sum(token_loss.dual_clipped, mask_R),
    }
    log_R = log_ratio(logp_R.detach().double(), logp_prox_R.detach().double(), mask_R)
    return Stats(means, {"ppo/max_abs_log_r": _max(log_R.abs(), mask_R)})


def ess(mean: float, mean_square: float) -> float:
    """Kish's effective sample size over n, `(sum w)^2 / (n sum w^2)`, from the moments of w; 0 when all weights are 0."""
    return mean * mean / mean_square if mean_square > 0 else 0.0


def with_ess(row: dict) -> dict:
    """The row with each pair of reduced moments `is/X_mean, is/X_sq_mean` turned into an effective sample size.

    `is/ess_token` is that of the untruncated ratio, whose collapse predicts divergence (arXiv:2602.17616).
    """
    row = dict(row)
    for moment, name in (("ratio", "is/ess_token"), ("weight", "is/ess_token_truncated")):
        square = row.pop(f"is/{moment}_sq_mean", None)
        if square is not None:
            row[name] = ess(row[f"is/{moment}_mean"], square)
    return row


def lag_histogram(lags_R: np.ndarray, mask_R: np.ndarray, overflow_lag: int) -> list[int]:
    """Trainable tokens by lag, 0 .. overflow_lag; the last bin also holds everything beyond. Raises ValueError on lag < 0."""
    lags = np.asarray(lags_R)[np.asarray(mask_R, bool)]
    if len(lags) and lags.min() < 0:
        raise ValueError(f"a token has lag {lags.min()}: it was sampled by a version that the learner has not made yet")
    return np.bincount(np.minimum(lags, overflow_lag), minlength=overflow_lag + 1).tolist()


def groups(rewards_by_group: Sequence[Sequence[float]]) -> dict[str, float]:
    """Shares of groups without variance, of those all rewarded or none; groups of fewer than two are not counted."""
    counted = [np.asarray(rewards, np.float64) for rewards in rewards_by_group if len(rewards) >= 2]
    flat = [rewards for rewards in counted if zero_variance(rewards)]
    n = max(1, len(counted))
    return {
        "group/zero_var_frac": len(flat) / n,
        "group/all_correct_frac": sum(bool(rewards.mean() > 0) for rewards in flat) / n,
        "group/all_wrong_frac": sum(bool(rewards.mean() <= 0) for rewards in flat) / n,
        "group/num_counted": float(len(counted)),
        "group/num_singleton": float(len(rewards_by_group) - len(counted)),
    }


def lengths(num_tokens_N: Sequence[int], finish_reasons_N: Sequence[str], rewards_N: Sequence[float]) -> dict[str, float]:
    """Mean and largest answer length in sampled tokens, by outcome, and the share cut by the limit; 0 when empty.

    Taken from raw lengths and finish reasons, so masking an answer for the loss does not change them.
    """
    tokens = np.asarray(num_tokens_N, np.float64)
    cut, good = np.asarray([why == "length" for why in finish_reasons_N], bool), np.asarray(rewards_N, np.float64) > 0

    def mean(x: np.ndarray) -> float:
        return float(x.mean()) if len(x) else 0.0

    return {
        "len/mean": mean(tokens),
        "len/max": float(tokens.max(initial=0.0)),
        "len/mean_correct": mean(tokens[good]),
        "len/mean_incorrect": mean(tokens[~good]),
        "truncated_frac": mean(cut),
    }
