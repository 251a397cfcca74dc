"""Trainable tokens of many trajectories as rows of a table, for recursions that run backwards in time. Imports torch only.

Masked tokens are left out before a recursion starts, so it carries over observations and padding as if they were not
there. Shape legend: K trainable tokens, trajectory after trajectory and in the order of time. Figures are float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned


class Rows(NamedTuple):
    """Where each trainable token stands: its slot in [R], its trajectory, how many of that trajectory come before it."""

    slot_K: Tensor
    sequence_K: Tensor
    column_K: Tensor
    last_K: Tensor  # bool: the last trainable token of its trajectory
    num_sequences: int
    num_tokens: int  # R


def rows(mask_R: Tensor, sequence_R: Tensor, num_sequences: int) -> Rows:
    """`sequence_R`, int64: the trajectory of each token, below `num_sequences`; only tokens of one trajectory need be in order.

    Raises ValueError when shapes differ or a trainable token is of no trajectory.
    """
    check_aligned(mask=mask_R, sequence=sequence_R)
    slot_K = mask_R.bool().nonzero().squeeze(1)
    slot_K = slot_K[sequence_R[slot_K].argsort(stable=True)]
    sequence_K = sequence_R[slot_K]
    if len(sequence_K) and not 0 <= int(sequence_K[0]) <= int(sequence_K[-1]) < num_sequences:
        raise ValueError(
            f"tokens belong to trajectories {int(sequence_K[0])} .. {int(sequence_K[-1])}, but there are {num_sequences}"
        )
    counts_N = torch.bincount(sequence_K, minlength=num_sequences)
    column_K = torch.arange(len(slot_K), device=mask_R.device) - (counts_N.cumsum(0) - counts_N)[sequence_K]
    return Rows(slot_K, sequence_K, column_K, column_K == counts_N[sequence_K] - 1, num_sequences, len(mask_R))


def picked(x_R: Tensor, at: Rows) -> Tensor:
    """float64 [K] of a figure per token, [R]."""
    return x_R.double()[at.slot_K]


def spread(x_K: Tensor, at: Rows) -> Tensor:
    """float64 [R] of a figure per trainable token; 0 at masked positions."""
    return torch.zeros(at.num_tokens, dtype=torch.float64, device=x_K.device).index_copy_(0, at.slot_K, x_K)


def shifted(x_K: Tensor, end_N: Tensor, at: Rows) -> Tensor:
    """float64 [K]: the figure of the next trainable token, and after the last that of the trajectory's end, [N]."""
    return torch.where(at.last_K, end_N.double()[at.sequence_K], torch.cat([x_K[1:], x_K[:1]]))


def backwards(x_K: Tensor, decay_K: Tensor, at: Rows) -> Tensor:
    """float64 [K]: `y_t = x_t + decay_t * y_{t+1}`, from 0 after the last trainable token of each trajectory."""
    x_TN, decay_TN = _table(x_K, at), _table(decay_K, at)
    y_TN = torch.zeros_like(x_TN)
    y_N = torch.zeros(at.num_sequences, dtype=torch.float64, device=x_K.device)
    for t in reversed(range(len(x_TN))):
        y_TN[t] = y_N = x_TN[t] + decay_TN[t] * y_N
    return y_TN[at.column_K, at.sequence_K]


def capped(log_decay_K: Tensor, log_cap: float, at: Rows) -> Tensor:
    """float64 [K]: decays lowered, from the end, just so much that no product of successive ones is above the cap (>= 1)."""
    log_TN = _table(log_decay_K, at)
    largest_N = torch.zeros(at.num_sequences, dtype=torch.float64, device=log_decay_K.device)
    for t in reversed(range(len(log_TN))):
        log_TN[t] = torch.minimum(log_TN[t], log_cap - largest_N)
        largest_N = (log_TN[t] + largest_N).clamp(min=0)  # of the products that start here, or the empty one
    return log_TN[at.column_K, at.sequence_K].exp()


def _table(x_K: Tensor, at: Rows) -> Tensor:
    """[T, N], time by trajectory, left-aligned, 0 where a trajectory has ended."""
    longest = int(at.column_K.max()) + 1 if len(x_K) else 0
    table_TN = torch.zeros(longest, at.num_sequences, dtype=torch.float64, device=x_K.device)
    table_TN[at.column_K, at.sequence_K] = x_K
    return table_TN
