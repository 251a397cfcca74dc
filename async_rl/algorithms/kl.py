"""KL divergence from a reference policy: estimators, the losses whose gradient is right, and what steers by it.

Imports torch only. Invariant: an estimate and its gradient are 0 at masked positions. Which placement has which gradient
(on samples of the behavior policy) is in tests/unit/algorithms/test_kl.py, by enumeration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms._tensors import check_aligned, check_detached, log_ratio

MAX_K3 = 10.0  # nats per token; beyond it e^x is all there is to see


def k1(logp_R: Tensor, logp_ref_R: Tensor, mask_R: Tensor) -> Tensor:
    """`log pi/ref`, [R]: unbiased for KL(pi || ref) on samples of pi, of either sign. Differentiated, its expectation is 0.

    This and those below raise ValueError when shapes differ, or when the reference or the behavior carries gradient.
    """
    check_aligned(logp=logp_R, logp_ref=logp_ref_R, mask=mask_R)
    check_detached(logp_ref=logp_ref_R)
    return log_ratio(logp_R, logp_ref_R, mask_R)


def k2(logp_R: Tensor, logp_ref_R: Tensor, mask_R: Tensor) -> Tensor:
    """`(log pi/ref)^2 / 2`, [R]: biased as a value; on samples of pi its gradient is that of KL(pi || ref)."""
    return k1(logp_R, logp_ref_R, mask_R) ** 2 / 2


def k3(logp_R: Tensor, logp_ref_R: Tensor, mask_R: Tensor) -> Tensor:
    """`ref/pi - 1 - log ref/pi`, at most MAX_K3, [R]: unbiased, never negative; its gradient is that of KL(ref || pi).

    joschu.net/blog/kl-approx.html; DeepSeekMath, arXiv:2402.03300. The value to log.
    """
    log_R = k1(logp_R, logp_ref_R, mask_R)
    return (torch.expm1(-log_R) + log_R).clamp(max=MAX_K3)


def detached_k2(logp_R: Tensor, logp_ref_R: Tensor, logp_behav_R: Tensor, mask_R: Tensor, cap: float) -> Tensor:
    """`min(pi/mu, cap) k2` with the ratio held constant, [R]: the gradient of KL(pi || ref) on samples of the behavior mu.

    arXiv:2510.01555. Exact where the cap does not cut.
    """
    return _weight(logp_R.detach(), logp_behav_R, mask_R).clamp(max=cap) * k2(logp_R, logp_ref_R, mask_R)


def attached_k3(logp_R: Tensor, logp_ref_R: Tensor, logp_behav_R: Tensor, mask_R: Tensor, cap: float) -> Tensor:
    """`pi/mu k3` with gradient through the ratio too, [R]: unbiased for KL(pi || ref), in value and gradient.

    DeepSeek-V3.2, arXiv:2512.02556. `cap` is not used: a ratio that is cut has no gradient, and without it that of k3 alone
    is of the wrong KL.
    """
    return _weight(logp_R, logp_behav_R, mask_R) * k3(logp_R, logp_ref_R, mask_R)


def straight_through_k3(logp_R: Tensor, logp_ref_R: Tensor, logp_behav_R: Tensor, mask_R: Tensor, cap: float) -> Tensor:
    """`min(pi/mu, cap)` held constant, times the value of k3 with the gradient of k2, [R]; verl's `k3+` when mu is pi."""
    slope_R = k2(logp_R, logp_ref_R, mask_R)
    value_R = k3(logp_R.detach(), logp_ref_R, mask_R)
    return _weight(logp_R.detach(), logp_behav_R, mask_R).clamp(max=cap) * (slope_R - slope_R.detach() + value_R)


def _weight(logp_R: Tensor, logp_behav_R: Tensor, mask_R: Tensor) -> Tensor:
    check_aligned(logp=logp_R, logp_behav=logp_behav_R, mask=mask_R)
    check_detached(logp_behav=logp_behav_R)
    return log_ratio(logp_R, logp_behav_R, mask_R).exp()


KLLoss = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]

KL_LOSSES: dict[str, KLLoss] = {
    "detached_k2": detached_k2,
    "attached_k3": attached_k3,
    "straight_through_k3": straight_through_k3,
}
"""name -> function of (logp_R, logp_ref_R, logp_behav_R, mask_R, cap) that gives a loss [R], to be multiplied by beta."""


def adaptive_beta(beta: float, kl: float, *, target: float, horizon: float, num_steps: float) -> float:
    """The next coefficient: `beta (1 + clip(kl / target - 1, +-.2) num_steps / horizon)`; arXiv:1909.08593.

    `num_steps` counts what `horizon` counts (episodes there). A KL of NaN leaves beta as it was.
    """
    if math.isnan(kl):
        return beta
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * num_steps / horizon)


class KLGate(NamedTuple):
    """Whether training is paused for having run away from the reference. A checkpoint keeps `_asdict()`."""

    paused: bool = False
    num_above: int = 0  # successive steps above the threshold, while not paused

    def step(self, seq_kl: float, *, threshold: float, patience: int, resume_ratio: float) -> KLGate:
        """The gate after a step whose mean over answers of their summed k1 is `seq_kl`, in nats.

        Pauses at the `patience`-th successive step above the threshold, and runs again below `resume_ratio * threshold`.
        NaN counts as above. A frozen policy keeps its KL: what lowers it while paused is the caller's to do.
        """
        if self.paused:
            return KLGate() if seq_kl < resume_ratio * threshold else self
        num_above = 0 if seq_kl <= threshold else self.num_above + 1
        return KLGate(paused=True) if num_above >= patience else KLGate(num_above=num_above)
