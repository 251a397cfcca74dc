"""The proximal log-probs without a forward pass. Imports torch only."""

from __future__ import annotations

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned, clean


def prox_logp_loglinear(
    logp_R: Tensor, logp_behav_R: Tensor, versions_R: Tensor, mask_R: Tensor, *, prox_version: int, current_version: int
) -> Tensor:
    """`logp_behav + a (logp - logp_behav)`, `a = (v_prox - v) / (v_theta - v)` clipped to [0, 1]; detached, [R], 0 when masked.

    A-3PO arXiv:2512.06547: the proximal policy lies on the line, in log space, between the one that sampled the token at
    version v and the current one. a is 0 for tokens that no version sampled (v < 0) or that are not older than the
    current one. Versions are integers. Raises ValueError when shapes differ.
    """
    check_aligned(logp=logp_R, logp_behav=logp_behav_R, versions=versions_R, mask=mask_R)
    behav_R = clean(logp_behav_R.detach(), mask_R)
    span_R = (current_version - versions_R).double()
    fraction_R = ((prox_version - versions_R) / span_R.clamp(min=1)).clamp(0, 1)
    fraction_R = torch.where((versions_R < 0) | (span_R <= 0), torch.zeros_like(fraction_R), fraction_R)
    return clean(behav_R + fraction_R.to(behav_R.dtype) * (clean(logp_R.detach(), mask_R) - behav_R), mask_R)
