"""Means of the scores that rewards give beside the reward. Pure; imports async_rl.types only.

Invariant: a mean is over the answers that have that score, so a score given to some answers only is not diluted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from async_rl.types import Trajectory


def mean_scores(trajectories: Iterable[Trajectory], prefix: str) -> dict[str, float]:
    """prefix + name -> mean, by name."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.scores.items():
            values[name].append(value)
    return {prefix + name: math.fsum(found) / len(found) for name, found in sorted(values.items())}
