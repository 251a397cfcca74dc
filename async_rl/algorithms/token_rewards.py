"""Rewards of single tokens: where a score lands, and what the reference policy takes off it. Imports torch only.

Invariant: masked positions get 0, and what stands there changes nothing; scores are constants, without gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms._rows import rows
from async_rl.algorithms._tensors import check_aligned
from async_rl.algorithms.kl import k1


@torch.no_grad()
def terminal_rewards(scores_N: Tensor, mask_R: Tensor, sequence_R: Tensor) -> Tensor:
    """float64 [R]: the score of a trajectory on its last trainable token, 0 elsewhere; one without such a token has none."""
    at = rows(mask_R, sequence_R, len(scores_N))
    rewards_R = torch.zeros(len(mask_R), dtype=torch.float64, device=scores_N.device)
    rewards_R[at.slot_K[at.last_K]] = scores_N.double()[at.sequence_K[at.last_K]]
    return rewards_R


@torch.no_grad()
def token_rewards_with_kl(
    scores_N: Tensor, logp_R: Tensor, logp_ref_R: Tensor, mask_R: Tensor, sequence_R: Tensor, *, beta: float
) -> Tensor:
    """The terminal score, less `beta (logp - logp_ref)` at every trainable token; float64 [R]. arXiv:1909.08593.

    With reward-to-go this has the gradient of the KL of whole answers, which no loss per token has (arXiv:2506.09477). `logp`
    is that of the policy that the update starts from. Raises ValueError when shapes differ.
    """
    check_aligned(logp=logp_R, logp_ref=logp_ref_R, mask=mask_R, sequence=sequence_R)
    return terminal_rewards(scores_N, mask_R, sequence_R) - beta * k1(logp_R.double(), logp_ref_R.double(), mask_R)


def overlong_penalty(num_tokens_N: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """float64 [N], to be added to the score: 0 up to `max - buffer`, then down in a straight line to -1 at `max` and beyond.

    DAPO's soft overlong punishment, arXiv:2503.14476 eq. 13. Raises ValueError unless `0 < buffer <= max`.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens is {buffer_tokens}: it must be above 0 and at most max_tokens, {max_tokens}")
    return ((max_tokens - buffer_tokens - num_tokens_N.double()) / buffer_tokens).clamp(-1, 0)
