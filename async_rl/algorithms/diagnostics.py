"""What a run reports about its own update: mismatch, weights, clipping, critic, reference, lag, lengths, groups.

Imports torch and numpy. Per-token figures come as (sum, count) pairs and maxima, so that they merge over micro-batches
and ranks; nothing here is a mean of means. Sums are float64. Invariant: masked positions change nothing, and no figure
divides by zero: an empty input gives counts of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms._tensors import MAX_LOG_RATIO, check_aligned, log_ratio
from async_rl.algorithms.critic import explained_variance
from async_rl.algorithms.filters import zero_variance
from async_rl.algorithms.kl import k1, k3
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


def mismatch_by_lag(logp_R: Tensor, logp_behav_R: Tensor, mask_R: Tensor, lags_R: Tensor, overflow_lag: int) -> Stats:
    """`mismatch` of the tokens of each lag: suffixes "_lag0", "_lag1" .. and, from `overflow_lag` on, "_lag2+"."""
    check_aligned(logp=logp_R, lags=lags_R)
    means, maxima = {}, {}
    for lag in range(overflow_lag + 1):
        last = lag == overflow_lag
        stats = mismatch(
            logp_R, logp_behav_R, mask_R & (lags_R >= lag if last else lags_R == lag), f"_lag{lag}{'+' if last else ''}"
        )
        means |= stats.means
        maxima |= stats.maxima
    return Stats(means, maxima)


def ratio(logp_prox_R: Tensor, logp_behav_R: Tensor, mask_R: Tensor) -> Stats:
    """Of the untruncated ratio rho of tokens: mean, which should be near 1 (1 +- .02), second moment for `ess`, largest."""
    check_aligned(logp_prox=logp_prox_R, logp_behav=logp_behav_R, mask=mask_R)
    rho_R = log_ratio(logp_prox_R.detach().double(), logp_behav_R.double(), mask_R).exp()
    means = {
        "is/ratio_mean": _sum(rho_R, mask_R),
        "is/ratio_sq_mean": _sum(rho_R**2, mask_R),
    }
    return Stats(means, {"is/ratio_max": _max(rho_R, mask_R)})


def correction(weight_R: Tensor, high_R: Tensor, low_R: Tensor, mask_R: Tensor) -> Stats:
    """Of the weight that a loss multiplies by: moments for `ess`, and the shares of what `corrections.cut` found.

    Give none of a loss that ignores the weight. A normalised weight is no longer the ratio, and is not cut for that.
    """
    check_aligned(weight=weight_R, high=high_R, low=low_R, mask=mask_R)
    means = {
        "is/weight_mean": _sum(weight_R, mask_R),
        "is/weight_sq_mean": _sum(weight_R.double() ** 2, mask_R),
        "is/trunc_frac_high": _sum(high_R, mask_R),
        "is/trunc_frac_low": _sum(low_R, mask_R),
    }
    return Stats(means)


def sequence_correction(
    logp_prox_R: Tensor,
    logp_behav_R: Tensor,
    weight_R: Tensor | None,
    mask_R: Tensor,
    sequence_R: Tensor,
    num_sequences: int,
    cap: float | None,
) -> Stats:
    """Of whole trajectories: moments of the product of rho, of the same cut at `cap`, and the share without any weight.

    Without a cap, or a weight (None: the loss ignores it), there is no figure of it.
    The mask is that before rejection; trajectories without a trainable token are not counted. A micro-batch must hold
    trajectories whole. `with_ess` turns the moments into `is/ess_seq` and `is/ess_seq_truncated`.
    """
    check_aligned(logp_prox=logp_prox_R, logp_behav=logp_behav_R, mask=mask_R, sequence=sequence_R)
    log_R = log_ratio(logp_prox_R.detach().double(), logp_behav_R.double(), mask_R)
    zeros_N = torch.zeros(num_sequences, dtype=torch.float64, device=log_R.device)
    log_N, tokens_N = (zeros_N.index_add(0, sequence_R, x) for x in (log_R, mask_R.double()))
    ratio_N, some_N = log_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), tokens_N > 0
    means = {
        "is/seq_ratio_mean": _sum(ratio_N, some_N),
        "is/seq_ratio_sq_mean": _sum(ratio_N**2, some_N),
    }
    if cap is not None:
        means["is/seq_weight_mean"] = _sum(ratio_N.clamp(max=cap), some_N)
        means["is/seq_weight_sq_mean"] = _sum(ratio_N.clamp(max=cap) ** 2, some_N)
    if weight_R is not None:
        check_aligned(logp_prox=logp_prox_R, weight=weight_R)
        weight_N = zeros_N.index_add(0, sequence_R, torch.where(mask_R, weight_R.double(), torch.zeros_like(log_R)))
        means["is/seq_reject_frac"] = _sum(weight_N == 0, some_N)
    return Stats(means)


def ratio_percentiles(ratios: np.ndarray, name: str) -> dict[str, float]:
    """`{name}_p01, _p50, _p99, _min, _max` of the ratios of trainable tokens, linear between neighbours; {} of none.

    Exact, so not mergeable: gather the ratios of all ranks first. A million tokens are 4 MB, once per step.
    """
    if not len(ratios):
        return {}
    figures = np.percentile(np.asarray(ratios, np.float64), [1, 50, 99, 0, 100])
    return {f"{name}_{which}": float(x) for which, x in zip(("p01", "p50", "p99", "min", "max"), figures, strict=True)}


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


def outside(logp_R: Tensor, logp_prox_R: Tensor, mask_R: Tensor, *, eps_low: float, eps_high: float) -> Stats:
    """Share of tokens whose ratio left [1 - eps_low, 1 + eps_high], whether or not that cost them their gradient."""
    check_aligned(logp=logp_R, logp_prox=logp_prox_R, mask=mask_R)
    ratio_R = log_ratio(logp_R.detach().double(), logp_prox_R.detach().double(), mask_R).exp()
    return Stats({"ppo/ratio_outside": _sum((ratio_R < 1 - eps_low) | (ratio_R > 1 + eps_high), mask_R)})


def value(values_R: Tensor, returns_R: Tensor, clipped_R: Tensor, mask_R: Tensor) -> Stats:
    """Moments of the returns and of what the critic leaves unexplained, for `with_explained_variance`, and its clip share."""
    check_aligned(values=values_R, returns=returns_R, clipped=clipped_R, mask=mask_R)
    returns_R, values_R = returns_R.double(), values_R.detach().double()
    means = {
        "value/returns_mean": _sum(returns_R, mask_R),
        "value/returns_sq_mean": _sum(returns_R**2, mask_R),
        "value/residual_mean": _sum(returns_R - values_R, mask_R),
        "value/residual_sq_mean": _sum((returns_R - values_R) ** 2, mask_R),
        "value/vf_clipfrac": _sum(clipped_R, mask_R),
    }
    return Stats(means)


def with_explained_variance(row: dict) -> dict:
    """The row with the squares of `value` turned into `value/returns_std` and `value/explained_var`."""
    row = dict(row)
    if "value/returns_sq_mean" in row:
        variance = max(0.0, row.pop("value/returns_sq_mean") - row["value/returns_mean"] ** 2)
        residual = max(0.0, row.pop("value/residual_sq_mean") - row["value/residual_mean"] ** 2)
        row["value/returns_std"] = math.sqrt(variance)
        row["value/explained_var"] = explained_variance(variance, residual)
    return row


def reference(logp_R: Tensor, logp_ref_R: Tensor, mask_R: Tensor, sequence_R: Tensor) -> Stats:
    """Distance from the reference policy in nats: k3 per token, and the sum of k1 per trajectory, which `kl.KLGate` watches.

    k1 can cancel out over tokens, k3 cannot. Trajectories without a trainable token are not counted; a micro-batch must hold
    trajectories whole.
    """
    logp_R, logp_ref_R = logp_R.detach().double(), logp_ref_R.double()
    total, _ = _sum(k1(logp_R, logp_ref_R, mask_R), mask_R)
    num_sequences = torch.tensor(len(sequence_R[mask_R].unique()), device=mask_R.device)
    return Stats({"kl_ref/k3": _sum(k3(logp_R, logp_ref_R, mask_R), mask_R), "kl_ref/seq_sum": (total, num_sequences)})


def ess(mean: float, mean_square: float) -> float:
    """Kish's effective sample size over n, `(sum w)^2 / (n sum w^2)`, from the moments of w; 0 when all weights are 0."""
    return mean * mean / mean_square if mean_square > 0 else 0.0


ESS_NAMES = {
    "ratio": "is/ess_token",
    "weight": "is/ess_token_truncated",
    "seq_ratio": "is/ess_seq",
    "seq_weight": "is/ess_seq_truncated",
}


def with_ess(row: dict) -> dict:
    """The row with each pair of reduced moments `is/X_mean, is/X_sq_mean` turned into an effective sample size.

    `is/ess_token` and `is/ess_seq` are those of untruncated ratios, whose collapse predicts divergence (arXiv:2602.17616).
    """
    row = dict(row)
    for moment, name in ESS_NAMES.items():
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


def staleness(versions_by_trajectory: Sequence[np.ndarray], version: int, overflow_lag: int) -> dict[str, object]:
    """Lag behind `version` of every sampled token: histogram, mean, largest, and the mean number of versions per trajectory.

    Give the versions of sampled tokens alone. Raises ValueError for a token of a later version.
    """
    sampled = [np.asarray(versions) for versions in versions_by_trajectory if len(versions)]
    lags = version - np.concatenate([np.zeros(0, np.int64), *sampled])
    return {
        "staleness/hist": lag_histogram(lags, np.ones(len(lags), bool), overflow_lag),
        "staleness/mean": float(lags.mean()) if len(lags) else 0.0,
        "staleness/max": int(lags.max(initial=0)),
        "staleness/versions_per_traj": float(np.mean([len(np.unique(v)) for v in sampled])) if sampled else 0.0,
    }


def groups(rewards_by_group: Sequence[Sequence[float]]) -> dict[str, float]:
    """Shares of groups without variance, of those all rewarded or none; groups of fewer than two are not counted.

    `eff_groups` is the number of those that can teach something.
    """
    counted = [np.asarray(rewards, np.float64) for rewards in rewards_by_group if len(rewards) >= 2]
    flat = [rewards for rewards in counted if zero_variance(rewards)]
    n = max(1, len(counted))
    return {
        "group/zero_var_frac": len(flat) / n,
        "group/all_correct_frac": sum(bool(rewards.mean() > 0) for rewards in flat) / n,
        "group/all_wrong_frac": sum(bool(rewards.mean() <= 0) for rewards in flat) / n,
        "group/num_counted": float(len(counted)),
        "group/num_singleton": float(len(rewards_by_group) - len(counted)),
        "group/eff_groups": float(len(counted) - len(flat)),
    }


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """Chance that one of k of the answers, drawn without replacement, is correct: `1 - C(n-c, k) / C(n, k)`.

    arXiv:2107.03374. Raises ValueError unless `0 <= c <= n` and `1 <= k <= n`.
    """
    if not (0 <= num_correct <= num_answers and 1 <= k <= num_answers):
        raise ValueError(f"pass@{k} of {num_answers} answers, {num_correct} of them correct, is not defined")
    return 1 - math.comb(num_answers - num_correct, k) / math.comb(num_answers, k)


def passes(rewards_by_group: Sequence[Sequence[float]], ks: Sequence[int]) -> dict[str, float]:
    """`pass@k` for each k, the mean over groups of at least k answers (none: left out); a reward above 0 is correct."""
    means: dict[str, float] = {}
    for k in ks:
        found = [pass_at_k(len(r), int((np.asarray(r) > 0).sum()), k) for r in rewards_by_group if len(r) >= k]
        if found:
            means[f"pass@{k}"] = float(np.mean(found))
    return means


def lengths(num_tokens_N: Sequence[int], finish_reasons_N: Sequence[str], rewards_N: Sequence[float]) -> dict[str, float]:
    """Mean, 95th percentile and largest of the answers' sampled tokens, means by outcome, shares cut and aborted; 0 when empty.

    Taken from raw lengths and finish reasons, so masking an answer for the loss does not change them.
    """
    tokens = np.asarray(num_tokens_N, np.float64)
    finish, good = np.asarray(finish_reasons_N, str), np.asarray(rewards_N, np.float64) > 0

    def mean(x: np.ndarray) -> float:
        return float(x.mean()) if len(x) else 0.0

    return {
        "len/mean": mean(tokens),
        "len/p95": float(np.percentile(tokens, 95)) if len(tokens) else 0.0,
        "len/max": float(tokens.max(initial=0.0)),
        "len/mean_correct": mean(tokens[good]),
        "len/mean_incorrect": mean(tokens[~good]),
        "truncated_frac": mean(finish == "length"),
        "aborted_frac": mean(finish == "abort"),
    }
