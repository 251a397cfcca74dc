"""Which weights survived the learner's restarts.

Owns the list of resume points. Imports numpy and async_rl.types only. Invariant: weights (i, v) are those of the
surviving timeline exactly if no incarnation after i resumed from a version below v.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from async_rl.types import Group


class Span(NamedTuple):
    """The weights behind a group's sampled tokens. `oldest` is None when nothing was sampled."""

    oldest: int | None
    newest: int
    lost: bool  # a token of a timeline that did not survive
    unknown: bool  # a token of an incarnation that has not begun


class Timeline:
    """The resume points of a run, one for each incarnation whose state was ever saved, and the current one."""

    def __init__(self, incarnation: int, version: int) -> None:
        self.incarnation = incarnation
        self.resumes: list[tuple[int, int]] = [(incarnation, version)]  # (incarnation, version it resumed at)

    def newest_survivor(self, incarnation: int) -> int | None:
        """The newest version of that incarnation which later ones share; None for the current one: all of its own."""
        return min((version for later, version in self.resumes if later > incarnation), default=None)

    def span(self, group: Group) -> Span:
        """Read the weights of the sampled tokens; observed ones (mask False) carry none."""
        names = [np.stack((t.incarnations[t.mask], t.versions[t.mask])) for t in group.trajectories if t.mask.any()]
        if not names:
            return Span(None, 0, lost=False, unknown=False)
        incarnations, versions = np.concatenate(names, axis=1)
        lost = unknown = False
        for incarnation in np.unique(incarnations).tolist():
            limit = self.newest_survivor(incarnation)
            lost |= limit is not None and bool((versions[incarnations == incarnation] > limit).any())
            unknown |= incarnation > self.incarnation or incarnation < 0
        return Span(int(versions.min()), int(versions.max()), lost, unknown)

    def extend(self, saved: list[tuple[int, int]]) -> None:
        """Put the resume points of a loaded checkpoint before the current one."""
        self.resumes = [(int(i), int(v)) for i, v in saved] + self.resumes[-1:]
