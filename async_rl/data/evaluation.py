"""The book-keeping of one evaluation.

Owns which held-out prompts are drawn, which answers are out, and what came back. Pure: no clock, no I/O; imports numpy,
async_rl.types and data/scores only. Invariants: the draws depend on the seed only, so evaluations of different versions
compare; an answer counts only if every sampled token is of the pinned weights; what is missing is counted, never guessed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from async_rl.data.scores import mean_scores
from async_rl.types import Group, Prompt, Trajectory, WeightName

# Evaluation ids carry bit 62; training ids count up from 0. Below it: the weights' name and the draw, so that a late
# answer of another evaluation, or of another life of the learner, can never be taken for one of this.
EVAL_BIT = 1 << 62
INDEX_BITS, VERSION_BITS, INCARNATION_BITS = 20, 30, 12


class Answered(NamedTuple):
    """One answer that came back; `pinned` says that the evaluated weights alone sampled it."""

    prompt: Prompt
    trajectory: Trajectory
    pinned: bool


def is_eval_id(group_id: int) -> bool:
    """Whether this group id is of an evaluation."""
    return group_id >= EVAL_BIT


def sampled_by(group: Group, name: WeightName) -> bool:
    """Whether every sampled token of the group came from exactly these weights."""
    return all(
        bool((t.incarnations[t.mask] == name.incarnation).all() and (t.versions[t.mask] == name.version).all())
        for t in group.trajectories
    )


class Evaluation:
    """`draws` held-out prompts, with replacement, to be answered by the weights `name` until `deadline_s`."""

    def __init__(self, prompts: Sequence[Prompt], draws: int, seed: int, name: WeightName, deadline_s: float) -> None:
        if not 0 < draws < 1 << INDEX_BITS or not prompts:
            raise ValueError(
                f"an evaluation of {draws} draws from {len(prompts)} prompts: both must be positive, draws < 2**20"
            )
        self.name = name
        self.deadline_s = deadline_s
        self.mixed = 0  # answered, but not by the pinned weights alone
        self.unscored = 0  # answered, but without a usable reward
        self._repeats = len(prompts) < draws
        picks = np.random.default_rng([seed, 1]).integers(len(prompts), size=draws)
        self._prompts = [prompts[i] for i in picks]
        self._base = EVAL_BIT | _bits(name.incarnation, INCARNATION_BITS) << (VERSION_BITS + INDEX_BITS)
        self._base |= _bits(name.version, VERSION_BITS) << INDEX_BITS
        self._todo = deque(range(draws))
        self._out: set[int] = set()
        self._rewards: dict[int, float] = {}
        self._answers: dict[int, Answered] = {}

    def next_lease(self) -> tuple[int, Prompt] | None:
        """The next (eval id, prompt) to be answered; None when all are out or answered."""
        if not self._todo:
            return None
        index = self._todo.popleft()
        self._out.add(index)
        return self._base | index, self._prompts[index]

    def give_back(self, group_ids: Iterable[int]) -> int:
        """These leases came to nothing (their rollout died): hand them out again. Returns how many were out."""
        lost = sorted({i for g in group_ids if (i := self._index(g)) in self._out})
        self._out.difference_update(lost)
        self._todo.extendleft(reversed(lost))
        return len(lost)

    def deliver(self, group_id: int, version_ok: bool, reward: float, trajectory: Trajectory | None = None) -> bool:
        """Book an answer; `version_ok` says that the pinned weights alone sampled it. False: nobody waits for it.

        The trajectory, if given, is kept with its scores.
        """
        index = self._index(group_id)
        if index not in self._out:
            return False
        self._out.discard(index)
        if trajectory is not None:
            self._answers[index] = Answered(self._prompts[index], trajectory, version_ok)
        if not version_ok:
            self.mixed += 1
        elif not math.isfinite(reward):
            self.unscored += 1
        else:
            self._rewards[index] = float(reward)
        return True

    @property
    def out(self) -> list[int]:
        """The ids that are leased and not answered."""
        return sorted(self._base | index for index in self._out)

    @property
    def done(self) -> bool:
        """Whether every draw has been answered."""
        return not self._todo and not self._out

    @property
    def num_delivered(self) -> int:
        """Answers that count."""
        return len(self._rewards)

    @property
    def missing(self) -> int:
        """Draws without an answer so far."""
        return len(self._todo) + len(self._out)

    @property
    def accuracy(self) -> float:
        """Mean reward over the answers that count; NaN without any."""
        return math.fsum(self._rewards.values()) / len(self._rewards) if self._rewards else math.nan

    def answered(self) -> list[Answered]:
        """What came back, in the order of the draws: also answers that do not count."""
        return [self._answers[index] for index in sorted(self._answers)]

    def summary(self) -> str:
        """The result for a terminal: the accuracy, what it counts, what it cannot count and the first error.

        Of fewer prompts than draws it says how many have an answer that counts: hundreds of answers to a few say little.
        """
        prompts = len({self._prompts[index].prompt_id for index in self._rewards}) if self._repeats else 0
        counts = [f"{self.num_delivered} answers{f' to {prompts} prompts' if prompts else ''}", f"{self.missing} missing"]
        counts += [f"{self.mixed} not by this version alone"] if self.mixed else []
        if self.unscored:
            errors = (a.trajectory.error for a in self.answered() if a.pinned and not math.isfinite(a.trajectory.reward))
            counts += [f"{self.unscored} could not be scored, the first: {next(errors, '') or 'no number'}"]
        return f"{f'{self.accuracy:.3f}' if self._rewards else 'unknown'} ({', '.join(counts)})"

    def row(self) -> dict[str, float | int]:
        """The result as a metrics row; it names the weights it is of. Means of scores are over the answers that count."""
        counted = [answer.trajectory for index, answer in self._answers.items() if index in self._rewards]
        return {
            "eval/version": self.name.version,
            "eval/incarnation": self.name.incarnation,
            "eval/accuracy": self.accuracy,
            "eval/num": self.num_delivered,
            "eval/missing": self.missing,
            "eval/mixed": self.mixed,
            "eval/unscored": self.unscored,
            **mean_scores(counted, "eval/score/"),
        }

    def _index(self, group_id: int) -> int:
        index = group_id & ((1 << INDEX_BITS) - 1)
        return index if self._base | index == group_id else -1


def _bits(value: int, width: int) -> int:
    return value & ((1 << width) - 1)
