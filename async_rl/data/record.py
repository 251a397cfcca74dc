"""What the ledger knows of one group, and the rules it is held to.

Owns the states of a group, its record and the verdict on a delivery. Imports numpy and async_rl.types only.
Invariant: a record's payload is present exactly in READY and TAKEN; a finished group keeps no record, only its fate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from async_rl.types import Attempt, Group, Prompt

OnStale = Literal["wait", "cancel", "train"]
DropReason = Literal["filtered", "failed", "stale", "skipped", "ended"]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)

Encode = Callable[[Group], list[Any]]  # frames: bytes or memoryviews
Decode = Callable[[list[bytes]], Group]
Deal = Callable[[int], tuple[Prompt, int]]  # step that will take the group -> its prompt, and how many answers it gets


class LedgerError(Exception):
    """A caller broke the ledger's protocol, or a checkpoint does not fit; one sentence."""


class State(StrEnum):
    """Where an unfinished group is. A finished one is trained, or dropped for a DropReason."""

    WAITING = "waiting"
    LEASED = "leased"
    READY = "ready"
    TAKEN = "taken"


@dataclass(frozen=True)
class Rules:
    """What the ledger enforces. `groups_per_step(k)` is G(k) >= 1: groups taken by the step that makes version k+1."""

    max_staleness: int
    on_stale: OnStale
    num_steps: int
    groups_per_step: Callable[[int], int]
    max_attempts: int
    lease_timeout_s: float
    max_buffered_bytes: int
    max_group_bytes: int
    max_refill: int = 4

    def window(self, first: int, last: int) -> int:
        """Groups that the steps first..last (inclusive) take, of those steps the run still has."""
        return sum(self.groups_per_step(k) for k in range(max(first, 0), min(last, self.num_steps - 1) + 1))

    def step_of(self, place: int, first: int) -> int:
        """The step that takes the untaken group with `place` others ahead of it, when the steps from `first` on take them in
        order. Within the run for a place within the window."""
        while place >= self.groups_per_step(first):
            place -= self.groups_per_step(first)
            first += 1
        return first


class Verdict(NamedTuple):
    """The final word on one delivery. `cancel` names a lease (rollout, attempt) that it made pointless."""

    outcome: Literal["accepted", "duplicate", "refused"]
    reason: str = ""
    cancel: tuple[str, Attempt] | None = None


@dataclass
class Record:
    """One unfinished group.

    `born`: the version every live rollout had committed when `first_attempt` was leased; no token that any attempt from
    `first_attempt` to `attempt` can deliver is older. `attempt` is the running one if LEASED, the next one if WAITING.
    """

    group_id: int
    prompt: Prompt
    attempt: Attempt
    first_attempt: Attempt  # earlier ones were cancelled, or belong to no surviving timeline
    born: int
    size: int  # siblings that every attempt must deliver, a greedy one included; decided at the first grant
    state: State = State.WAITING
    num_tries: int = 0  # attempts that ended without a result
    rollout_id: str | None = None
    leased_s: float = 0.0
    deadline_s: float = 0.0
    num_bytes: int = 0
    num_tokens: int = 0
    oldest_version: int = 0  # of the sampled tokens of the payload
    taken_version: int = -1
    payload: Group | None = None

    @property
    def lag(self) -> int:
        """Head lag of a TAKEN group: learner version when taken - version of its oldest token."""
        return self.taken_version - self.oldest_version

    @property
    def age_order(self) -> tuple[int, int]:
        """Sorts oldest first."""
        return self.born, self.group_id

    @property
    def reborn(self) -> bool:
        """Whether no attempt is out that could still deliver, so that the next lease is a new birth."""
        return self.state is State.WAITING and self.first_attempt == self.attempt

    def next_attempt(self, incarnation: int) -> Attempt:
        """The attempt that follows, of the life of the learner that leases it."""
        return Attempt(incarnation, self.attempt.n + 1 if self.attempt.incarnation == incarnation else 0)

    def empty(self, more_answers: int, version: int) -> None:
        """Of a record on no shelf yet: it waits to be born anew at `version`, with so many answers more than before."""
        self.payload, self.num_bytes, self.num_tokens = None, 0, 0
        self.state, self.first_attempt = State.WAITING, self.attempt
        self.born, self.size = version, self.size + more_answers

    def issued(self, attempt: Attempt) -> bool:
        """Whether this attempt may deliver: leased in a surviving timeline, and not cancelled since."""
        newest_is_out = self.state is not State.WAITING
        return self.first_attempt <= attempt and (attempt < self.attempt or (newest_is_out and attempt == self.attempt))


def pack_record(record: Record, encode: Encode) -> dict[str, Any]:
    """The record as msgpack-able data; the payload as the frames that `encode` makes of it."""
    return {
        "group_id": record.group_id,
        "prompt": pack_prompt(record.prompt),
        "attempt": list(record.attempt),
        "first_attempt": list(record.first_attempt),
        "born": record.born,
        "size": record.size,
        "state": record.state.value,
        "num_tries": record.num_tries,
        "num_bytes": record.num_bytes,
        "num_tokens": record.num_tokens,
        "oldest_version": record.oldest_version,
        "taken_version": record.taken_version,
        "payload": None if record.payload is None else [bytes(frame) for frame in encode(record.payload)],
    }


def unpack_record(data: dict[str, Any], decode: Decode) -> Record:
    """The inverse of `pack_record`; which rollout held it, and until when, is forgotten."""
    numbers = ("group_id", "born", "size", "num_tries", "num_bytes", "num_tokens", "oldest_version", "taken_version")
    return Record(
        prompt=unpack_prompt(data["prompt"]),
        attempt=Attempt(*data["attempt"]),
        first_attempt=Attempt(*data["first_attempt"]),
        state=State(data["state"]),
        payload=None if data["payload"] is None else decode(data["payload"]),
        **{name: data[name] for name in numbers},
    )


def pack_prompt(prompt: Prompt) -> list[Any]:
    """The prompt as msgpack-able data."""
    return [prompt.prompt_id, np.asarray(prompt.token_ids, np.int32).tobytes(), prompt.text, prompt.fields]


def unpack_prompt(data: list[Any]) -> Prompt:
    prompt_id, ids, text, fields = data
    return Prompt(prompt_id, np.frombuffer(ids, np.int32), text, fields)
