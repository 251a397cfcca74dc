"""The few tensor habits that all of the algorithms share. Imports torch only.

Invariant: log-ratios are subtracted in at least fp32, cleaned of masked positions, and clamped before `exp`.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: large enough to be clipped everywhere, far from overflow in fp32


def check_aligned(**tensors: Tensor) -> None:
    """Raise ValueError, naming both tensors and both shapes, unless all are 1-D of one length.

    Broadcasting a per-sequence tensor against a per-token one is silent in torch, and right by accident when sizes agree.
    """
    first, *others = tensors.items()
    if first[1].dim() != 1:
        raise ValueError(f"{first[0]} must be flat, one entry per token or trajectory, but has shape {tuple(first[1].shape)}")
    for name, tensor in others:
        if tensor.shape != first[1].shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but {first[0]} has shape {tuple(first[1].shape)}")


def check_detached(**tensors: Tensor) -> None:
    """Raise ValueError for a tensor that carries gradient: it would add a term that no paper has."""
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise ValueError(f"{name} carries gradient: detach it, it is a constant of the loss")


def clean(x: Tensor, mask: Tensor) -> Tensor:
    """x at least in fp32, 0 where the mask is False; no gradient reaches those positions, not even NaN."""
    x = x if x.dtype == torch.float64 else x.float()
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """`log(numerator / denominator)` of two log-probs, 0 at masked positions, clamped to +-MAX_LOG_RATIO."""
    return (clean(numerator, mask) - clean(denominator, mask)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
