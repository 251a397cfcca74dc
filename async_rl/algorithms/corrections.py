"""Importance-sampling weights from the behavior to the proximal policy: what staleness and engine mismatch cost.

Imports torch only. Invariant: a weight never carries gradient, and is 0 at masked positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned, log_ratio


def token_truncate(logp_prox_R: Tensor, logp_behav_R: Tensor, mask_R: Tensor, cap: float) -> Tensor:
    """`min(exp(logp_prox - logp_behav), cap)` per token, detached, [R].

    Truncated importance sampling (TIS), fengyao.notion.site/off-policy-rl, on the ratio of decoupled PPO,
    arXiv:2505.24298. Biased towards smaller steps on tokens the behavior policy found unlikely; variance is bounded.
    """
    check_aligned(logp_prox=logp_prox_R, logp_behav=logp_behav_R, mask=mask_R)
    ratio_R = log_ratio(logp_prox_R.detach(), logp_behav_R.detach(), mask_R).exp().clamp(max=cap)
    return torch.where(mask_R, ratio_R, torch.zeros_like(ratio_R))


def none(logp_prox_R: Tensor, logp_behav_R: Tensor, mask_R: Tensor, cap: float) -> Tensor:
    """1 at trainable tokens: right only where the behavior policy is the proximal one, that is at lag 0."""
    check_aligned(logp_prox=logp_prox_R, logp_behav=logp_behav_R, mask=mask_R)
    return mask_R.to(logp_prox_R.dtype if logp_prox_R.dtype == torch.float64 else torch.float32)


Correction = Callable[[Tensor, Tensor, Tensor, float], Tensor]

CORRECTIONS: dict[str, Correction] = {"token_truncate": token_truncate, "none": none}
"""name -> function of (logp_prox_R, logp_behav_R, mask_R, cap) that gives weights [R]."""
