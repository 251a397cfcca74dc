"""What a policy loss may look at, and what it gives. Imports torch only.

Invariant: all tensors are flat, aligned, of whole trajectories (a sequence ratio over a part of one would be another
number), and only the current log-probs carry gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned, check_detached


class Terms(NamedTuple):
    """Everything a loss or a mask may look at; R tokens of `num_sequences` whole trajectories."""

    logp_R: Tensor  # pi_theta, the policy that is being trained; with gradient
    logp_prox_R: Tensor  # pi_p, the policy before the updates on this batch
    logp_behav_R: Tensor  # mu, the policy that sampled the token
    advantages_R: Tensor
    weight_R: Tensor  # importance-sampling weight from mu to pi_p, see corrections
    mask_R: Tensor  # bool, True at trainable tokens
    sequence_R: Tensor  # int64, the trajectory of each token, 0 .. num_sequences - 1
    num_sequences: int


class TokenLoss(NamedTuple):
    """A loss per token and where its gradient was cut or its weight capped; every tensor is [R], the flags are bool."""

    loss: Tensor
    clipped_high: Tensor
    clipped_low: Tensor
    dual_clipped: Tensor


def check(terms: Terms) -> None:
    """Raise ValueError unless all tensors have one length, all but `logp_R` are constants, and mask and index are typed."""
    check_aligned(
        logp=terms.logp_R,
        logp_prox=terms.logp_prox_R,
        logp_behav=terms.logp_behav_R,
        advantages=terms.advantages_R,
        weight=terms.weight_R,
        mask=terms.mask_R,
        sequence=terms.sequence_R,
    )
    check_detached(
        logp_prox=terms.logp_prox_R,
        logp_behav=terms.logp_behav_R,
        advantages=terms.advantages_R,
        weight=terms.weight_R,
    )
    if terms.mask_R.dtype != torch.bool:
        raise ValueError(f"mask has dtype {terms.mask_R.dtype}, but must be bool")
    if terms.sequence_R.dtype != torch.int64:
        raise ValueError(f"sequence has dtype {terms.sequence_R.dtype}, but must be int64")
