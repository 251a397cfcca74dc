"""Rewards on a scale that does not drift: running moments, and what is done with them. Imports torch only.

Invariant: a state is a plain dict of floats, for a checkpoint; one writer, the learner, updates it from moments of all
ranks. Group baselines that divide by a std undo any of this; with a critic, scaling alone keeps its targets in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from async_rl.algorithms._tensors import check_aligned, clean
from async_rl.algorithms.whitening import mean_and_variance

State = dict[str, float]


def ema_update(state: State, moments_3: Tensor, momentum: float) -> State:
    """Moving averages of the batches' means and of the variances within them (n - 1); the first batch counts alone.

    The rule of the article that this project started from. It misses the variance between batches; a batch of one answer,
    which has none within, counts as 0. A batch of no answer changes nothing.
    """
    if not moments_3[0]:
        return state
    mean, variance = (float(x) for x in mean_and_variance(moments_3, ddof=1))
    if not state:
        return {"mean": mean, "variance": variance}
    old, new = momentum, 1 - momentum
    return {"mean": old * state["mean"] + new * mean, "variance": old * state["variance"] + new * variance}


def ema_statistics(state: State) -> tuple[float, float]:
    """(mean, variance); 0 and 1 before the first batch."""
    return state.get("mean", 0.0), state.get("variance", 1.0)


def debiased_ema_update(state: State, moments_3: Tensor, momentum: float) -> State:
    """Moving averages of x and x^2 from 0, with the weight they have gathered; as EwmaMoments of openai/ppo-ewma.

    The variance includes that between batches, and needs no second answer in a batch. A batch of no answer changes nothing.
    """
    count, total, square = moments_3.tolist()
    if not count:
        return state
    batch = {"weight": 1.0, "first": total / count, "second": square / count}
    return {name: momentum * state.get(name, 0.0) + (1 - momentum) * x for name, x in batch.items()}


def debiased_ema_statistics(state: State) -> tuple[float, float]:
    """(mean, variance); 0 and 1 before the first batch."""
    if not state:
        return 0.0, 1.0
    mean = state["first"] / state["weight"]
    return mean, max(0.0, state["second"] / state["weight"] - mean**2)


def normalize(
    rewards_N: Tensor,
    valid_N: Tensor,
    statistics: tuple[float, float],
    *,
    clip: float = 5.0,
    scale_only: bool = False,
    min_std: float = 1e-2,
) -> Tensor:
    """`(R - mean) / sqrt(var + 1e-8)` within +-clip, float64 [N]; 0 for answers that are not valid.

    `scale_only` leaves the mean in: to subtract one that moves shifts what a critic must learn. `min_std` keeps the first
    success after batches of failures from being a jump to the clip. Raises ValueError when shapes differ.
    """
    check_aligned(rewards=rewards_N, valid=valid_N)
    mean, variance = statistics
    std = max((variance + 1e-8) ** 0.5, min_std)
    return clean(((rewards_N.double() - (0.0 if scale_only else mean)) / std).clamp(-clip, clip), valid_N.bool())


class Normalizer(NamedTuple):
    """`update(state, moments_3, momentum)` gives the next state, from {} on; `moments_3` is that of `whitening.moments`."""

    update: Callable[[State, Tensor, float], State]
    statistics: Callable[[State], tuple[float, float]]  # (mean, variance), for `normalize`
    moments: frozenset[str]  # what a state holds once a batch has been seen


NORMALIZERS: dict[str, Normalizer] = {
    "ema": Normalizer(ema_update, ema_statistics, frozenset({"mean", "variance"})),
    "debiased_ema": Normalizer(debiased_ema_update, debiased_ema_statistics, frozenset({"weight", "first", "second"})),
}
