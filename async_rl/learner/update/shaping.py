"""Rewards as they are learnt from: less for overlong answers, on a running scale where one is configured.

Owns the running moments; rank 0 alone has them. Imports torch and algorithms. Invariant: an answer without a reward stays
without one and enters no moment, nor does one that is only compared with; the state is plain floats, for the checkpoint.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from async_rl.algorithms.normalizers import NORMALIZERS, normalize
from async_rl.algorithms.token_rewards import overlong_penalty
from async_rl.algorithms.whitening import moments
from async_rl.config import AlgorithmConfig
from async_rl.observability.log import get_logger

_log = get_logger(__name__)


class RewardShaping:
    """`max_tokens`: the longest answer allowed."""

    def __init__(self, algorithm: AlgorithmConfig, max_tokens: int) -> None:
        self.algorithm = algorithm
        self.max_tokens = max_tokens
        self.state: dict[str, float] = {}

    def state_dict(self) -> dict[str, float]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Of another normalizer than this life's there is nothing to take up: the scale begins anew, which is told. Raises
        ValueError for what is no number, or of no normalizer."""
        if not all(math.isfinite(x) for x in state.values()):
            raise ValueError("a running moment of the rewards is not finite")
        was = next((name for name, kind in NORMALIZERS.items() if kind.moments == state.keys()), "none")
        if state and was == "none":
            raise ValueError(f"no normalizer has the running moments {', '.join(map(repr, state))}")
        self.state = dict(state) if was == self.algorithm.normalizer else {}
        if state and not self.state:
            _log.warning(
                "algorithm.normalizer was %s and is %s: its running moments begin anew", was, self.algorithm.normalizer
            )

    def shaped(self, rewards_N: Tensor, valid_N: Tensor, num_tokens_N: Tensor, baseline_N: Tensor) -> Tensor:
        """float64 [N]; the running moments first take the valid rewards in. What is neither valid nor a baseline comes back as
        it was. `baseline_N`: what valid answers are compared with, so shaped as they are, though the policy did not sample it.
        """
        a, given_N, wanted_N = self.algorithm, rewards_N, valid_N | baseline_N
        if a.overlong_buffer_tokens:
            rewards_N = rewards_N + overlong_penalty(num_tokens_N, self.max_tokens, a.overlong_buffer_tokens)
        if a.normalizer != "none":
            options = dict(a.normalizer_options)
            normalizer = NORMALIZERS[a.normalizer]
            self.state = normalizer.update(self.state, moments(rewards_N, valid_N), options.pop("momentum"))
            rewards_N = normalize(rewards_N, wanted_N, normalizer.statistics(self.state), **options)
        return torch.where(wanted_N, rewards_N, given_N)
