"""Finished groups, kept until the learner's final word on each.

Owns every group between its last token and its Ack, over any number of connections; imports transport and types.
Invariant: a group leaves only by an Ack for its (group id, attempt); leases, hence slots, bound how many there are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from dataclasses import dataclass

from async_rl.observability.log import get_logger
from async_rl.observability.waiting import waiting
from async_rl.transport.base import Link
from async_rl.transport.codec import BadMessage
from async_rl.transport.messages import Ack
from async_rl.types import Attempt, Group

log = get_logger(__name__)


@dataclass
class _Entry:
    group: Group
    pushed_s: float | None = None  # None: to be pushed (again)


class Outbox:
    """One per process; `run` drives it over one connection at a time."""

    def __init__(self, resend_s: float) -> None:
        self.counts: Counter[str] = Counter()  # "ack/<outcome>", "pushed", "pushed_again"
        self._resend_s = resend_s
        self._entries: dict[tuple[int, Attempt], _Entry] = {}  # in order of completion
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_train(self) -> int:
        """Unacknowledged training groups: each still holds its slot."""
        return sum(e.group.split == "train" for e in self._entries.values())

    def put(self, group: Group) -> None:
        self._entries[group.group_id, group.attempt] = _Entry(group)
        self._changed.set()

    def ack(self, message: Ack) -> None:
        """Forget the group; an Ack for one already forgotten (it was pushed twice) is only counted."""
        entry = self._entries.pop((message.group_id, Attempt(*message.attempt)), None)
        self.counts[f"ack/{message.outcome}" if entry else "ack/again"] += 1
        if message.outcome == "refused":
            log.info("group %d attempt %s was refused: %s", message.group_id, message.attempt, message.reason)

    async def run(self, link: Link, rollout_id: str) -> None:
        """Push everything unacknowledged over this connection, oldest first, then what comes, until cancelled.

        A group whose Ack is overdue by resend_s is pushed again: an Ack may be lost, and the learner knows duplicates.
        """
        for entry in self._entries.values():
            entry.pushed_s = None
        while True:
            self._changed.clear()
            entry = next((e for e in self._entries.values() if self._due(e)), None)
            if entry is None:
                await self._wait()
                continue
            try:
                # the learner answers the sender, so a group carries the id of the connection it travels on
                with waiting(f"the learner to take group {entry.group.group_id}"):
                    await link.push(dataclasses.replace(entry.group, rollout_id=rollout_id))
            except BadMessage as e:
                self._unsendable(entry.group, e)
                continue
            entry.pushed_s = time.monotonic()
            self.counts["pushed"] += 1

    def _unsendable(self, group: Group, why: BadMessage) -> None:
        """No Ack can come for what cannot be sent; the lease's deadline settles it at the learner."""
        del self._entries[group.group_id, group.attempt]
        self.counts[f"unsendable/{why.reason}"] += 1
        log.error("group %d attempt %s cannot be sent: %s", group.group_id, tuple(group.attempt), why)

    def _due(self, entry: _Entry) -> bool:
        if entry.pushed_s is None:
            return True
        if time.monotonic() - entry.pushed_s < self._resend_s:
            return False
        self.counts["pushed_again"] += 1
        return True

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._resend_s / 4):
                await self._changed.wait()
        except TimeoutError:
            pass
