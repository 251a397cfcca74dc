"""Generalized advantage estimation over the trainable tokens of trajectories of any length. Imports torch only.

Invariant: masked tokens (padding, observations) are skipped, neither discounted nor learnt from: the figures are those of
the trajectory without them, and 0 where they stand. All float64, without gradient. Values must come from one version of
the critic, computed when the batch is consumed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms._rows import Rows, backwards, picked, rows, shifted, spread
from async_rl.algorithms._tensors import check_aligned


@torch.no_grad()
def gae(
    rewards_R: Tensor,
    values_R: Tensor,
    mask_R: Tensor,
    sequence_R: Tensor,
    bootstrap_N: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """`(advantages_R, returns_R)` with `A_t = d_t + gamma lam A_{t+1}`, `d_t = r_t + gamma V_{t+1} - V_t`, returns `A + V`.

    arXiv:1506.02438. `bootstrap_N` follows the last trainable token: 0 where the trajectory ended, the value of its last
    state where it was cut. `lam` is one number or one per trajectory, [N]. `sequence_R`, int64, holds the trajectory of each
    token. Returns are the critic's targets, so they are taken before any whitening. Raises ValueError when shapes differ.
    """
    check_aligned(rewards=rewards_R, values=values_R, mask=mask_R, sequence=sequence_R)
    at = rows(mask_R, sequence_R, len(bootstrap_N))
    values_K = picked(values_R, at)
    delta_K = picked(rewards_R, at) + gamma * shifted(values_K, bootstrap_N, at) - values_K
    advantages_K = backwards(delta_K, gamma * lam_per_token(lam, at), at)
    return spread(advantages_K, at), spread(advantages_K + values_K, at)


def gae_decoupled(
    rewards_R: Tensor,
    values_R: Tensor,
    mask_R: Tensor,
    sequence_R: Tensor,
    bootstrap_N: Tensor,
    *,
    gamma: float,
    lam_policy: float | Tensor,
    lam_value: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """`(advantages_R, returns_R)` of `gae`, each with a lambda of its own; VC-PPO and VAPO, arXiv:2504.05118.

    They take `lam_value=1`, so that a late reward reaches the first token's target, and a smaller one for the policy.
    """
    args = (rewards_R, values_R, mask_R, sequence_R, bootstrap_N)
    advantages_R, _ = gae(*args, gamma=gamma, lam=lam_policy)
    _, returns_R = gae(*args, gamma=gamma, lam=lam_value)
    return advantages_R, returns_R


def length_adaptive_lambda(num_tokens_N: Tensor, alpha: float = 0.05) -> Tensor:
    """float64 [N]: `1 - 1 / (alpha l)` within [0, 1], l the trainable tokens of a trajectory; VAPO, arXiv:2504.05118.

    The sum of the weights of the TD errors is then proportional to the length. A trajectory without tokens gets 0.
    """
    return (1 - 1 / (alpha * num_tokens_N.double().clamp(min=1))).clamp(0, 1)


def lam_per_token(lam: float | Tensor, at: Rows) -> Tensor:
    """float64 [K] of one lambda or of one per trajectory, [N]. Raises ValueError when there are more or fewer of them."""
    if not isinstance(lam, Tensor):
        return torch.full((len(at.slot_K),), lam, dtype=torch.float64, device=at.slot_K.device)
    if lam.shape != (at.num_sequences,):
        raise ValueError(f"lam has shape {tuple(lam.shape)}, but there are {at.num_sequences} trajectories")
    return lam.double()[at.sequence_K]
