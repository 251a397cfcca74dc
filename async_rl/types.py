"""The nouns that travel through the house: Prompt, Trajectory, Group, Batch.

Owns nothing but data; imports numpy only. Invariant: every per-token array of a trajectory is indexed by
*response token* and has the same length T; `logprobs[t]` is the log-probability of token t given everything before it.

Shape legend: P prompt tokens, T response tokens, N trajectories of a batch, R response tokens of a batch (sum of T),
L tokens of a batch (sum of P + T).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]
Split = Literal["train", "eval"]
MAX_REWARD = 1e12  # larger ones lose their last digits to fp32, and their squares soon everything
MAX_SCORES = 16  # beside the reward, per answer
MAX_SCORE_NAME_BYTES = 64


class Attempt(NamedTuple):
    """One try at a leased group: the learner's life that granted it, and a counter within the group."""

    incarnation: int
    n: int


class WeightName(NamedTuple):
    """The full name of a set of weights; as a label in engines and logs it reads "incarnation:version"."""

    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.version}"

    @classmethod
    def parse(cls, label: str) -> WeightName:
        """Read "2:13"; raises ValueError on anything else."""
        incarnation, _, version = label.partition(":")
        return cls(int(incarnation), int(version))


@dataclass(frozen=True)
class Prompt:
    """A task instance. `fields` holds whatever the reward needs beside the text (JSON values only)."""

    prompt_id: str
    token_ids: np.ndarray  # int32 [P]; rendered and tokenized once, by the learner
    text: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How one answer is drawn. temperature 0 is greedy. `seed` None leaves the engine's own stream."""

    max_new_tokens: int
    temperature: float
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one request; every array is [T]."""

    prompt_ids: np.ndarray  # int32 [P], as the engine saw them
    token_ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T], of the sampled id, at the sampling temperature
    incarnations: np.ndarray  # int32 [T], with `versions`: the weights that sampled each token
    versions: np.ndarray  # int32 [T]
    finish_reason: FinishReason


@dataclass(frozen=True)
class Trajectory:
    """One scored answer. `reward` is NaN when it could not be scored; `error` then says why."""

    token_ids: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T], behavior log-probs
    incarnations: np.ndarray  # int32 [T]
    versions: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T], True where the policy sampled the token
    finish_reason: FinishReason
    reward: float
    error: str = ""
    scores: dict[str, float] = field(default_factory=dict)  # further figures of the reward function, finite, to be logged

    @property
    def num_tokens(self) -> int:
        """Response tokens, sampled or observed."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Group:
    """The sibling trajectories of one prompt, as pushed by a rollout for one attempt at one lease."""

    group_id: int
    attempt: Attempt
    split: Split
    rollout_id: str
    prompt_ids: np.ndarray  # int32 [P]
    trajectories: tuple[Trajectory, ...]

    @property
    def num_tokens(self) -> int:
        """Response tokens over all siblings: what the ledger's token books count."""
        return sum(t.num_tokens for t in self.trajectories)


@dataclass(frozen=True)
class Batch:
    """One learner step's trajectories, flat, as scattered to the ranks. Padding exists only inside a micro-batch."""

    ids: np.ndarray  # int32 [L], prompt then response, trajectory after trajectory
    prompt_lengths: np.ndarray  # int32 [N]
    response_lengths: np.ndarray  # int32 [N]
    logp_behav: np.ndarray  # float32 [R]
    rewards: np.ndarray  # float64 [N], as they are to be learnt from; 0 where there is none
    advantages: np.ndarray  # float64 [N], against the siblings; 0 with a method that has none of those
    truncated: np.ndarray  # bool [N], cut by the length limit, so its last state has a future
    mask: np.ndarray  # bool [R], trainable tokens
    lags: np.ndarray  # int32 [R], learner version at consumption - version of the token
    group_ids: np.ndarray  # int64 [N]

    @property
    def num_trajectories(self) -> int:
        return len(self.prompt_lengths)
