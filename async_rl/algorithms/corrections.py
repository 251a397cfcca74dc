"""Importance-sampling weights from the behavior to the proximal policy: what staleness and engine mismatch cost.

Imports torch only. Invariant: a weight never carries gradient, and is 0 at masked positions; a weight of whole
trajectories counts their trainable tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from async_rl.algorithms._tensors import MAX_LOG_RATIO, check_aligned, clean, log_ratio
from async_rl.algorithms.aggregation import num_tokens_per_sequence
from async_rl.algorithms.sequences import sequence_mean, sequence_sum

LEVELS = ("token", "sequence", "geometric")
MODES = ("none", "truncate", "clip", "mask")


def weights(
    logp_prox_R: Tensor,
    logp_behav_R: Tensor,
    mask_R: Tensor,
    sequence_R: Tensor,
    num_sequences: int,
    *,
    level: str,
    mode: str,
    low: float | None,
    high: float | None,
) -> Tensor:
    """The ratio `rho = exp(logp_prox - logp_behav)` at a level, bounded by a mode; detached, [R].

    Levels: token `rho_t`; sequence `prod_t rho_t`, unbiased, but its variance grows exponentially with length; geometric
    `(prod_t rho_t)^(1/T)`. Modes: none; truncate `min(rho, high)`, TIS of fengyao.notion.site/off-policy-rl; clip to
    [low, high]; mask, 0 outside [low, high] and rho inside: IcePop arXiv:2510.18855 by token, MIS arXiv:2512.23075 by
    sequence. Truncate ignores `low`, none both. Raises ValueError for differing shapes, an unknown level or mode, or a
    bound that the mode needs and is None.
    """
    check_aligned(logp_prox=logp_prox_R, logp_behav=logp_behav_R, mask=mask_R, sequence=sequence_R)
    log_R = log_ratio(logp_prox_R.detach(), logp_behav_R.detach(), mask_R)
    ratio_R = _at_level(log_R, mask_R, sequence_R, num_sequences, level).exp()
    return clean(_bounded(ratio_R, mode, low, high), mask_R)


def cut(
    logp_prox_R: Tensor,
    logp_behav_R: Tensor,
    mask_R: Tensor,
    sequence_R: Tensor,
    num_sequences: int,
    *,
    level: str,
    mode: str,
    low: float | None,
    high: float | None,
) -> tuple[Tensor, Tensor]:
    """(above `high`, below `low`), bool [R]: the ratio of that level where the mode does not leave it as it is."""
    log_R = log_ratio(logp_prox_R.detach(), logp_behav_R.detach(), mask_R)
    ratio_R = _at_level(log_R, mask_R, sequence_R, num_sequences, level).exp()
    above = torch.inf if mode == "none" or high is None else high
    below = 0.0 if mode in ("none", "truncate") or low is None else low
    return (ratio_R > above) & mask_R, (ratio_R < below) & mask_R


def none(
    logp_prox_R: Tensor,
    logp_behav_R: Tensor,
    mask_R: Tensor,
    sequence_R: Tensor,
    num_sequences: int,
    *,
    low: float | None,
    high: float | None,
) -> Tensor:
    """1 at trainable tokens, [R]: right only where the behavior policy is the proximal one, that is at lag 0."""
    check_aligned(logp_prox=logp_prox_R, logp_behav=logp_behav_R, mask=mask_R, sequence=sequence_R)
    return mask_R.to(logp_prox_R.dtype if logp_prox_R.dtype == torch.float64 else torch.float32)


def batch_sum(weight_R: Tensor, mask_R: Tensor, sequence_R: Tensor, num_sequences: int, level: str) -> tuple[Tensor, Tensor]:
    """(sum, count) of the weights for `batch_normalised`, 0-d float64, to be added over micro-batches and ranks.

    At token level every trainable token counts; at the others every trajectory with one does, whatever its length. Raises
    ValueError when shapes differ or the level is unknown.
    """
    check_aligned(weight=weight_R, mask=mask_R, sequence=sequence_R)
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}: one of {', '.join(LEVELS)}")
    if level == "token":
        return clean(weight_R, mask_R).double().sum(), mask_R.sum().double()
    means_N = sequence_mean(weight_R, mask_R, sequence_R, num_sequences)
    return means_N.sum(), (num_tokens_per_sequence(mask_R, sequence_R, num_sequences) > 0).sum().double()


def batch_normalised(weight_R: Tensor, total: Tensor, count: Tensor) -> Tensor:
    """The weights divided by their mean over the batch, `total / count`, both over all ranks; [R], unchanged if all are 0.

    Self-normalised importance sampling, verl's `rollout_is_batch_normalize`: a batch that is stale as a whole does not
    take a smaller or larger step for it.
    """
    mean = total / count.clamp(min=1)
    return weight_R / torch.where(mean > 0, mean, torch.ones_like(mean)).to(weight_R.dtype)


def _at_level(log_R: Tensor, mask_R: Tensor, sequence_R: Tensor, num_sequences: int, level: str) -> Tensor:
    """The log-ratio of the token, of its trajectory, or the latter's mean; [R], within +-MAX_LOG_RATIO."""
    if level == "token":
        return log_R
    if level == "sequence":
        log_N = sequence_sum(log_R, mask_R, sequence_R, num_sequences).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    elif level == "geometric":
        log_N = sequence_mean(log_R, mask_R, sequence_R, num_sequences)
    else:
        raise ValueError(f"unknown level {level!r}: one of {', '.join(LEVELS)}")
    return log_N[sequence_R].to(log_R.dtype)


def _bounded(ratio_R: Tensor, mode: str, low: float | None, high: float | None) -> Tensor:
    if mode == "none":
        return ratio_R
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}: one of {', '.join(MODES)}")
    if high is None:
        raise ValueError(f"mode {mode!r} needs high, but it is None")
    if mode == "truncate":
        return ratio_R.clamp(max=high)
    if low is None:
        raise ValueError(f"mode {mode!r} needs low, but it is None")
    if mode == "clip":
        return ratio_R.clamp(low, high)
    return torch.where((ratio_R < low) | (ratio_R > high), torch.zeros_like(ratio_R), ratio_R)


CORRECTIONS: dict[str, Callable[..., Tensor]] = {"none": none} | {
    f"{level}_{mode}": partial(weights, level=level, mode=mode) for level in LEVELS for mode in MODES
}
"""name -> function of (logp_prox_R, logp_behav_R, mask_R, sequence_R, num_sequences, *, low, high) that gives weights [R].

"none" is the weight 1, `<level>_none` the ratio without bounds.
"""
