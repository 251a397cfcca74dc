"""The learner's own look at a delivered group: what no batch could use never gets into one.

Owns the count of what was left out, by reason. Call under the control plane's lock. Imports algorithms, config and the
ledger. Invariant: what is refused or dropped here is counted in the events.
"""

from __future__ import annotations

from collections import Counter

from async_rl.algorithms import filters
from async_rl.config import Config
from async_rl.data.ledger import Ledger
from async_rl.types import Group


class Screen:
    def __init__(self, config: Config, vocab_size: int, ledger: Ledger, events: Counter[str]) -> None:
        self.config, self.ledger, self.events = config, ledger, events
        self.vocab_size = vocab_size  # ids below it can be scored
        self.last_error = ""
        self.failed_in_a_row = 0  # groups dropped as unscorable since the last good one

    def unfit(self, group: Group) -> str:
        """What no honest rollout would send, whoever sends it: the reason to refuse it, or ""."""
        if len(group.trajectories) != self.config.group_size:
            return "group_size"
        if any(t.num_tokens > self.config.rollout.max_new_tokens for t in group.trajectories):
            return "too_long"
        if any(int(t.token_ids.max(initial=0)) >= self.vocab_size for t in group.trajectories):
            return "token_out_of_vocabulary"
        return ""

    def sift(self, group: Group) -> None:
        """Drop an accepted group at once when no batch can use it, so that its slot is free again."""
        reasons = [filters.valid(t) for t in group.trajectories]
        rewards = [t.reward for t, why in zip(group.trajectories, reasons, strict=True) if not why]
        for trajectory, why in zip(group.trajectories, reasons, strict=True):
            if why:
                self.events[f"invalid/{why}"] += 1
                self.last_error = trajectory.error or why
        if len(rewards) < 2:
            self.ledger.drop([group.group_id], "failed")
            self.events["groups_dropped_unscorable"] += 1
            self.failed_in_a_row += 1
            return
        self.failed_in_a_row = 0
        refill = self.config.algorithm.zero_variance == "refill" and filters.zero_variance(rewards)
        if refill and self.ledger.may_filter():
            self.ledger.drop([group.group_id], "filtered")
