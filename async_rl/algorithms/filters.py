"""What may take part in a batch. Numpy only, on Trajectory and raw rewards.

Invariant: decided from what a trajectory carries (finish reason, reward, log-probs), never from its position or width,
and before any group statistic. Whatever is left out has a reason, so that it can be counted.
"""

from __future__ import annotations

from collections.abc import Sequence

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
