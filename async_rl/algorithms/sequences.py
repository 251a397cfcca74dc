"""Sums and means over the trainable tokens of each trajectory. Imports torch only.

Invariant: float64 whatever the input, since a ratio of thousands of tokens is the exponential of such a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms._tensors import clean
from async_rl.algorithms.aggregation import num_tokens_per_sequence


def sequence_sum(x_R: Tensor, mask_R: Tensor, sequence_R: Tensor, num_sequences: int) -> Tensor:
    """Sum over each trajectory's trainable tokens, float64 [N]; 0 without any."""
    zeros_N = torch.zeros(num_sequences, dtype=torch.float64, device=x_R.device)
    return zeros_N.index_add_(0, sequence_R, clean(x_R, mask_R).double())


def sequence_mean(x_R: Tensor, mask_R: Tensor, sequence_R: Tensor, num_sequences: int) -> Tensor:
    """Mean over each trajectory's trainable tokens, float64 [N]; 0 without any."""
    counts_N = num_tokens_per_sequence(mask_R, sequence_R, num_sequences)
    return sequence_sum(x_R, mask_R, sequence_R, num_sequences) / counts_N.clamp(min=1)
