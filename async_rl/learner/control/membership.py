"""One composition of the broadcast group, and what its members get wrong.

Owns the count of failures by name, and the threads in which blocking group operations run. Imports control and weights.
Invariant: a rollout that fails updates again and again, under whatever id, is told to exit in the end.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from async_rl.learner.control.members import Member
from async_rl.learner.control.plane import ControlPlane
from async_rl.weights.group import WeightGroup

MAX_FAULTS = 3  # updates in a row that may fail because of one rollout, by name, before it is told to exit


@dataclass(frozen=True)
class Sums:
    """What receivers must report: the digest of each bucket, and the checksum of the loaded weights."""

    bucket_digests: list[str]
    checksum: str


class MemberLost(Exception):
    """Members left, were expelled or failed in a phase: the publish starts over with the others."""


@dataclass
class Membership:
    """One composition of the broadcast group."""

    number: int
    members: list[Member]
    group: WeightGroup | None = None
    ranks: dict[str, int] = field(default_factory=dict)  # rollout id -> first rank
    world_size: int = 1
    tag: str = ""  # random, tells its keys in the store from any other's

    @property
    def ids(self) -> set[str]:
        return {m.rollout_id for m in self.members}


class Faults:
    """Call under the control plane's lock."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._by_name: Counter[str] = Counter()  # in a row; whoever rejoins does not start anew

    def reported(self, rollout_id: str, text: str) -> None:
        """A member says that it could not take part: it may try again, but not for ever."""
        if self._count(rollout_id) >= MAX_FAULTS:
            why = f"{MAX_FAULTS} weight updates in a row failed, the last with: {text}"
            self._control.expel(rollout_id, why, time.monotonic(), code="fatal")

    def caused(self, rollout_id: str, why: str) -> None:
        """A member kept the others waiting: it is expelled, and may come back, but not for ever."""
        code = "fatal" if self._count(rollout_id) >= MAX_FAULTS else "rejoin"
        self._control.expel(rollout_id, why, time.monotonic(), code=code)

    def forgive(self, name: str) -> None:
        """It has committed."""
        self._by_name.pop(name, None)

    def _count(self, rollout_id: str) -> int:
        name = rollout_id.rpartition("#")[0]
        self._by_name[name] += 1
        return self._by_name[name]


def in_thread(call: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run a blocking group operation in a daemon thread: one that is stuck with a dead member must not hold up the exit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    return future


def close_late(forming: Future[WeightGroup]) -> None:
    """A group that formed after it was given up."""
    if forming.exception() is None:
        forming.result().close()
