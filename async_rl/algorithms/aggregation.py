"""From per-token losses to one number, so that neither micro-batches nor ranks can change it. Imports torch only.

With D ranks over which gradients are averaged, micro-batch b adds `D * S_b / N`: S_b sums `scale * loss` over its
trainable tokens, N is the denominator of the whole optimizer step, over all ranks, counted before the first backward
on the mask before any rejection. Invariant: N is an integer and additive over trajectories, so ranks add their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned, clean


class Aggregation(NamedTuple):
    """Both functions take the trainable tokens of each trajectory, int64 [N]."""

    scales: Callable[[Tensor], Tensor]  # weight of one token of each trajectory, float64 [N]
    denominator: Callable[[Tensor], int]


def _ones(num_tokens_N: Tensor) -> Tensor:
    return torch.ones_like(num_tokens_N, dtype=torch.float64)


def _one_over_length(num_tokens_N: Tensor) -> Tensor:
    return 1.0 / num_tokens_N.clamp(min=1).double()


def _tokens(num_tokens_N: Tensor) -> int:
    return int(num_tokens_N.sum())


def _sequences(num_tokens_N: Tensor) -> int:
    return int((num_tokens_N > 0).sum())


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": Aggregation(_ones, _tokens),  # DAPO, arXiv:2503.14476: every token weighs the same
    "seq_mean_token_mean": Aggregation(_one_over_length, _sequences),  # GRPO, arXiv:2402.03300: every answer does
    "seq_mean_token_sum": Aggregation(_ones, _sequences),  # longer answers weigh more, as in REINFORCE
}


def num_tokens_per_sequence(mask_R: Tensor, sequence_R: Tensor, num_sequences: int) -> Tensor:
    """Trainable tokens of each trajectory, int64 [N]; `sequence_R` holds the trajectory of each token, int64."""
    check_aligned(mask=mask_R, sequence=sequence_R)
    zeros_N = torch.zeros(num_sequences, dtype=torch.int64, device=mask_R.device)
    return zeros_N.index_add_(0, sequence_R, mask_R.long())


def token_scales(mode: str, mask_R: Tensor, sequence_R: Tensor, num_tokens_N: Tensor) -> Tensor:
    """float64 [R]: what multiplies each token's loss in S; 0 at masked positions. `sequence_R` indexes `num_tokens_N`."""
    check_aligned(mask=mask_R, sequence=sequence_R)
    return clean(AGGREGATIONS[mode].scales(num_tokens_N)[sequence_R], mask_R)


def denominator(mode: str, num_tokens_N: Tensor) -> int:
    """This rank's share of N, for the trajectories of one optimizer step; sum it over ranks. 0: there is nothing to train."""
    return AGGREGATIONS[mode].denominator(num_tokens_N)


def contribution(loss_R: Tensor, scale_R: Tensor, mask_R: Tensor, num_ranks: int, global_denominator: int) -> Tensor:
    """`D * S_b / N`, the scalar that one micro-batch differentiates, in the dtype of the loss; 0 without tokens.

    Raises ValueError when N is not positive: such a step is skipped, not divided by zero.
    """
    if global_denominator <= 0:
        raise ValueError(f"the loss denominator is {global_denominator}: skip a step without trainable tokens")
    check_aligned(loss=loss_R, scale=scale_R, mask=mask_R)
    loss_R = clean(loss_R, mask_R)
    return (loss_R * clean(scale_R, mask_R).to(loss_R.dtype)).sum() * (num_ranks / global_denominator)
