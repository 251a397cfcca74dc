"""From per-token losses to one number, so that neither micro-batches nor ranks can change it. Imports torch only.

With D ranks over which gradients are averaged, micro-batch b adds `D * S_b / N`: S_b sums `scale * loss` over its
trainable tokens, N is the denominator of the whole optimizer step, over all ranks, counted before the first backward
on the mask before any rejection. Invariant: N is an integer and additive over trajectories, so ranks add their own; that
of prompt_mean is additive over whole groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned, clean


class Sequences(NamedTuple):
    """What is known of the trajectories. A mode that needs what is None raises ValueError."""

    num_tokens_N: Tensor  # int64, trainable tokens
    group_ids_N: Tensor | None = None  # int64, the prompt of each
    max_tokens: int | None = None  # longest answer that is allowed


class Aggregation(NamedTuple):
    scales: Callable[[Sequences], Tensor]  # weight of one token of each trajectory, float64 [N]
    denominator: Callable[[Sequences], int]


def _ones(seqs: Sequences) -> Tensor:
    return torch.ones_like(seqs.num_tokens_N, dtype=torch.float64)


def _one_over_length(seqs: Sequences) -> Tensor:
    return 1.0 / seqs.num_tokens_N.clamp(min=1).double()


def _one_over_max(seqs: Sequences) -> Tensor:
    if not seqs.max_tokens or seqs.max_tokens < 1:
        raise ValueError(f"seq_mean_token_sum_norm divides by the longest answer allowed, but max_tokens is {seqs.max_tokens}")
    return _ones(seqs) / seqs.max_tokens


def _one_over_prompt(seqs: Sequences) -> Tensor:
    """By the trainable tokens of all answers to the same prompt."""
    index_N, tokens_M = _prompts(seqs)
    return 1.0 / tokens_M[index_N].clamp(min=1).double()


def _tokens(seqs: Sequences) -> int:
    return int(seqs.num_tokens_N.sum())


def _sequences(seqs: Sequences) -> int:
    return int((seqs.num_tokens_N > 0).sum())


def _prompts_with_tokens(seqs: Sequences) -> int:
    return int((_prompts(seqs)[1] > 0).sum())


def _prompts(seqs: Sequences) -> tuple[Tensor, Tensor]:
    """(prompt of each trajectory [N], trainable tokens of each prompt, int64 [M])."""
    if seqs.group_ids_N is None:
        raise ValueError("prompt_mean weighs every prompt alike: give group_ids_N, the prompt of each trajectory")
    check_aligned(num_tokens=seqs.num_tokens_N, group_ids=seqs.group_ids_N)
    ids_M, index_N = torch.unique(seqs.group_ids_N, return_inverse=True)
    return index_N, torch.zeros_like(ids_M, dtype=torch.int64).index_add_(0, index_N, seqs.num_tokens_N)


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": Aggregation(_ones, _tokens),  # DAPO, arXiv:2503.14476: every token weighs the same
    "seq_mean_token_mean": Aggregation(_one_over_length, _sequences),  # GRPO, arXiv:2402.03300: every answer does
    "seq_mean_token_sum": Aggregation(_ones, _sequences),  # longer answers weigh more, as in REINFORCE
    "seq_mean_token_sum_norm": Aggregation(_one_over_max, _sequences),  # Dr.GRPO, arXiv:2503.20783: over a constant
    "prompt_mean": Aggregation(_one_over_prompt, _prompts_with_tokens),  # ScaleRL, arXiv:2510.13786: every prompt does
}


def num_tokens_per_sequence(mask_R: Tensor, sequence_R: Tensor, num_sequences: int) -> Tensor:
    """Trainable tokens of each trajectory, int64 [N]; `sequence_R` holds the trajectory of each token, int64."""
    check_aligned(mask=mask_R, sequence=sequence_R)
    zeros_N = torch.zeros(num_sequences, dtype=torch.int64, device=mask_R.device)
    return zeros_N.index_add_(0, sequence_R, mask_R.long())


def token_scales(
    mode: str,
    mask_R: Tensor,
    sequence_R: Tensor,
    num_tokens_N: Tensor,
    *,
    group_ids_N: Tensor | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """float64 [R]: what multiplies each token's loss in S; 0 at masked positions. `sequence_R` indexes `num_tokens_N`.

    prompt_mean needs `group_ids_N`, and all answers to a prompt in `num_tokens_N`, on whichever rank they are;
    seq_mean_token_sum_norm needs `max_tokens`. Raises ValueError without them.
    """
    check_aligned(mask=mask_R, sequence=sequence_R)
    scale_N = AGGREGATIONS[mode].scales(Sequences(num_tokens_N, group_ids_N, max_tokens))
    return clean(scale_N[sequence_R], mask_R)


def denominator(mode: str, num_tokens_N: Tensor, *, group_ids_N: Tensor | None = None) -> int:
    """This rank's share of N, for the trajectories of one optimizer step; sum it over ranks. 0: there is nothing to train.

    prompt_mean needs `group_ids_N` (ValueError without) and counts a prompt once where it is given all of its answers.
    """
    return AGGREGATIONS[mode].denominator(Sequences(num_tokens_N, group_ids_N))


def contribution(loss_R: Tensor, scale_R: Tensor, mask_R: Tensor, num_ranks: int, global_denominator: int) -> Tensor:
    """`D * S_b / N`, the scalar that one micro-batch differentiates, in the dtype of the loss; 0 without tokens.

    Raises ValueError when N is not positive: such a step is skipped, not divided by zero.
    """
    if global_denominator <= 0:
        raise ValueError(f"the loss denominator is {global_denominator}: skip a step without trainable tokens")
    check_aligned(loss=loss_R, scale=scale_R, mask=mask_R)
    loss_R = clean(loss_R, mask_R)
    return (loss_R * clean(scale_R, mask_R).to(loss_R.dtype)).sum() * (num_ranks / global_denominator)
