"""What may take part in a batch. Numpy only, on Trajectory and raw rewards.

Invariant: decided from what a trajectory carries (finish reason, reward, log-probs), never from its position or width,
and before any group statistic. Whatever is left out has a reason, so that it can be counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from async_rl.types import Trajectory

MAX_LOGPROB = 1e-3  # zero, and what rounding adds to it
ZERO_STD = 1e-6  # below this, rewards differ by rounding only: seven of 0.7 in fp32 would get advantages of 0.056


def valid(trajectory: Trajectory) -> str:
    """ "" when the trajectory can be trained on, else why not: aborted, error, empty, untrained, bad_logprob, unscorable.

    An answer cut by its length limit is valid, and so is one that is a single end token: its advantage is a signal.
    """
    if trajectory.finish_reason == "abort":
        return "aborted"
    if trajectory.finish_reason == "error":
        return "error"
    if trajectory.num_tokens == 0:
        return "empty"
    if not trajectory.mask.any():
        return "untrained"
    logprobs = trajectory.logprobs[trajectory.mask]
    if not (np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB)).all():
        return "bad_logprob"
    if trajectory.error or not np.isfinite(trajectory.reward):
        return "unscorable"
    return ""


def zero_variance(rewards: Sequence[float] | np.ndarray) -> bool:
    """True when the (valid) rewards of a group cannot tell its answers apart: std < 1e-6, or fewer than two of them.

    Judged on the raw rewards, whatever the advantage estimator scales by; agrees with `advantages.grpo` giving zeros.
    """
    rewards_G = np.asarray(rewards, np.float64)
    if len(rewards_G) < 2:
        return True
    return bool((rewards_G - rewards_G.min()).std(ddof=1) < ZERO_STD)


def overlong(trajectory: Trajectory) -> bool:
    """Cut by its length limit: of what it would have become, its reward says little (DAPO, arXiv:2503.14476)."""
    return trajectory.finish_reason == "length"


def stale(trajectory: Trajectory, version: int, max_staleness: int) -> bool:
    """Its oldest sampled token is more than `max_staleness` versions behind `version`, the learner's at consumption."""
    versions = trajectory.versions[trajectory.mask]
    return len(versions) > 0 and version - int(versions.min()) > max_staleness


def group_reasons(
    trajectories: Sequence[Trajectory],
    *,
    version: int,
    max_staleness: int,
    drop_overlong: bool = False,
    drop_zero_variance: bool = False,
) -> list[str]:
    """Why each sibling is left out, "" for those that stay: that of `valid`, else stale, overlong, singleton, zero_variance.

    The last two, only with `drop_zero_variance`, are judged on those that are left: what is dropped enters no statistic.
    """
    reasons = [valid(t) for t in trajectories]
    for k, trajectory in enumerate(trajectories):
        if not reasons[k] and stale(trajectory, version, max_staleness):
            reasons[k] = "stale"
        elif not reasons[k] and drop_overlong and overlong(trajectory):
            reasons[k] = "overlong"
    rewards = [t.reward for t, why in zip(trajectories, reasons, strict=True) if not why]
    if drop_zero_variance and zero_variance(rewards):
        whole = "singleton" if len(rewards) == 1 else "zero_variance"
        reasons = [why or whole for why in reasons]
    return reasons


def count_reasons(reasons: Iterable[str]) -> dict[str, int]:
    """How many were left out, by reason; those that stay are not counted."""
    return dict(Counter(why for why in reasons if why))
