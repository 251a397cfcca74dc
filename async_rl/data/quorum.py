"""Which weights the rollouts serve: who is live, what each has committed, and what is therefore released.

Owns the membership as the ledger sees it. Imports nothing of ours. Invariant: `released` never goes down, so no group
is born before a group granted earlier; a rollout that serves older weights than `released` gets no lease.
"""

from __future__ import annotations


class Quorum:
    """A rollout is live from its first commit until it leaves; an excused one is live, but nobody waits for it."""

    def __init__(self) -> None:
        self.committed: dict[str, int] = {}
        self.excused: set[str] = set()
        self.released: int | None = None  # the newest version that every live rollout has committed; None before the first

    @property
    def newest(self) -> int:
        """The newest version any live rollout serves; -1 without one."""
        return max(self.committed.values(), default=-1)

    def commit(self, rollout_id: str, version: int) -> None:
        """This rollout serves `version` from now on, and counts (again) for the release."""
        self.committed[rollout_id] = version
        self.excused.discard(rollout_id)
        self._release()

    def excuse(self, rollout_id: str) -> None:
        """Stop waiting for this rollout, and give it no lease, until its next commit."""
        if rollout_id in self.committed:
            self.excused.add(rollout_id)
            self._release()

    def leave(self, rollout_id: str) -> None:
        self.committed.pop(rollout_id, None)
        self.excused.discard(rollout_id)
        self._release()

    def may_lease(self, rollout_id: str) -> bool:
        """Whether it is live, counted, and has committed what is released."""
        if self.released is None or rollout_id in self.excused:
            return False
        return self.committed.get(rollout_id, -1) >= self.released

    def behind(self, version: int) -> list[str]:
        """The rollouts that hold back the release of `version`."""
        return sorted(r for r, v in self.committed.items() if v < version and r not in self.excused)

    def _release(self) -> None:
        counted = [v for r, v in self.committed.items() if r not in self.excused]
        if counted:
            self.released = max(min(counted), -1 if self.released is None else self.released)
