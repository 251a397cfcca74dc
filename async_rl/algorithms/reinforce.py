"""REINFORCE with whitening over the tokens of the whole batch instead of a critic. Imports torch only.

Invariant: masked tokens are skipped, and come out as 0. All float64, without gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms._rows import backwards, picked, rows, spread
from async_rl.algorithms._tensors import check_aligned, clean
from async_rl.algorithms.whitening import whiten


@torch.no_grad()
def discounted_returns(
    token_rewards_R: Tensor, mask_R: Tensor, sequence_R: Tensor, num_sequences: int, *, gamma: float
) -> Tensor:
    """`G_t = r_t + gamma G_{t+1}` over trainable tokens, float64 [R]; what REINFORCE++ whitens."""
    check_aligned(token_rewards=token_rewards_R, mask=mask_R, sequence=sequence_R)
    at = rows(mask_R, sequence_R, num_sequences)
    rewards_K = picked(token_rewards_R, at)
    return spread(backwards(rewards_K, torch.full_like(rewards_K, gamma), at), at)


def reinforce_pp(
    token_rewards_R: Tensor,
    mask_R: Tensor,
    sequence_R: Tensor,
    num_sequences: int,
    *,
    gamma: float,
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """`(advantages_R, returns_R)`: discounted returns, whitened over all tokens given. REINFORCE++, arXiv:2501.03262.

    For a batch that is dealt to ranks: `discounted_returns`, then `whiten` with the moments of all ranks.
    """
    returns_R = discounted_returns(token_rewards_R, mask_R, sequence_R, num_sequences, gamma=gamma)
    return whiten(returns_R, mask_R, eps=eps), returns_R


def reinforce_pp_baseline(
    centered_N: Tensor, mask_R: Tensor, sequence_R: Tensor, moments_3: Tensor | None = None, *, eps: float = 1e-8
) -> Tensor:
    """Rewards less their group's mean, [N], given to each token and whitened over tokens, float64 [R]; arXiv:2501.03262.

    `centered_N` is that of `ADVANTAGES["reinforce_pp_baseline"]`; longer answers weigh more in the mean and the std. The
    mask leaves out what could not be compared. `moments_3` as in `whiten`.
    """
    check_aligned(mask=mask_R, sequence=sequence_R)
    return whiten(clean(centered_N.double()[sequence_R], mask_R), mask_R, moments_3, eps=eps)
