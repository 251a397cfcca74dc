"""The learner's own look at a delivered group: what no batch could use never gets into one.

Owns the count of what was left out, by reason, and says it, rarely. Call under the control plane's lock. Imports
algorithms, config and the ledger. Invariant: what is refused or dropped here is counted in the events.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from async_rl.algorithms import filters
from async_rl.config import Config
from async_rl.config.method_rules import SIBLINGS
from async_rl.data.ledger import Ledger
from async_rl.types import Group

EXCEPTION = re.compile(r"(?:^|\braised |\bscored: )([A-Za-z_]\w{0,63}):(?: |$)")  # in what envs/rewards and rollouts say
MAX_KINDS = 16


class Screen:
    def __init__(
        self, config: Config, vocab_size: int, ledger: Ledger, events: Counter[str], notice: Callable[[str], None]
    ) -> None:
        self.config, self.ledger, self.events, self.notice = config, ledger, events, notice
        self.invalid: Counter[str] = Counter()  # answers that no step can use, by kind; at most MAX_KINDS
        self._noticed = 0  # how many there were at the last notice
        self.vocab_size = vocab_size  # ids below it can be scored
        self.last_error = ""
        self.failed_in_a_row = 0  # groups dropped as unscorable since the last good one

    def unfit(self, group: Group) -> str:
        """What no honest rollout would send, whoever sends it: the reason to refuse it, or ""."""
        if any(t.num_tokens > self.config.rollout.max_new_tokens for t in group.trajectories):
            return "too_long"
        if any(int(t.token_ids.max(initial=0)) >= self.vocab_size for t in group.trajectories):
            return "token_out_of_vocabulary"
        return ""

    def sift(self, group: Group) -> None:
        """Drop an accepted group at once when no batch can use it, so that its slot is free again."""
        reasons = [filters.valid(t) for t in group.trajectories]
        for trajectory, why in zip(group.trajectories, reasons, strict=True):
            if why:
                self._count(why, trajectory.error)
        self._notice_rarely()
        if not self._usable([not why for why in reasons]):
            self.ledger.drop([group.group_id], "failed")
            self.events["groups_dropped_unscorable"] += 1
            self.failed_in_a_row += 1
            return
        self.failed_in_a_row = 0
        refill = self.config.algorithm.zero_variance == "refill" and not self.has_signal(group)
        if refill and self.ledger.may_filter():
            self.ledger.drop([group.group_id], "filtered")

    def has_signal(self, group: Group) -> bool:
        """Whether the rewards of its sampled answers differ."""
        sampled = group.trajectories[:-1] if self.config.algorithm.has_greedy else group.trajectories
        return not filters.zero_variance([t.reward for t in sampled if not filters.valid(t)])

    def _usable(self, valid: list[bool]) -> bool:
        """Whether any answer has what the advantage compares it with: the greedy one, a sibling, or nothing."""
        if self.config.algorithm.has_greedy:
            return valid[-1] and any(valid[:-1])
        return sum(valid) >= (2 if self.config.algorithm.advantage in SIBLINGS else 1)

    def _count(self, why: str, error: str) -> None:
        """By the type of the exception where there was one."""
        found = EXCEPTION.search(error)
        kind = found.group(1) if found else why
        if kind not in self.invalid and len(self.invalid) >= MAX_KINDS - 1:
            kind = "other"
        self.invalid[kind] += 1
        self.events[f"invalid/{kind}"] += 1
        self.last_error = error or why

    def _notice_rarely(self) -> None:
        """The first time, and then each time that there are twice as many."""
        total = self.invalid.total()
        if total and total >= 2 * self._noticed:
            self._noticed = total
            kinds = ", ".join(f"{n} {kind}" for kind, n in self.invalid.most_common(3))
            self.notice(f"answers that could not be used so far: {total} ({kinds}), the last: {self.last_error}")
