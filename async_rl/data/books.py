"""The books: where every group and every token went.

Owns the counters of what is over. What is still in the ledger is counted anew from its records each time, so a balance
is a check that can fail. Imports async_rl.data.record only. Invariant: nothing is subtracted, ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from async_rl.data.record import DROP_REASONS, DropReason, Record, State, Verdict
from async_rl.types import Group

# How a lease ends. A "delivered_late" group is one whose lease had ended before; it is counted beside.
ENDINGS = ("delivered", "superseded", "expired", "left", "refused", "cancelled", "dropped", "restarted")
LIVE, TRAINED = 0, 1  # fates; a drop reason's is its place in DROP_REASONS + 2


class Books:
    """One byte of fate for each group ever granted (its id is the index), and counters of tokens and attempts."""

    def __init__(self) -> None:
        self.fates = bytearray()
        self.tokens: Counter[str] = Counter()  # received, trained, refused, duplicate
        self.dropped_tokens: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()  # issued, accepted, and why the others ended
        self.refused: Counter[str] = Counter()  # deliveries, by reason
        self.wasted_tokens: Counter[str] = Counter()  # of cancelled groups, by length of the answer

    def open(self) -> int:
        """A new group; its id."""
        self.fates.append(LIVE)
        return len(self.fates) - 1

    def close(self, record: Record, reason: DropReason | None) -> None:
        """The one end of a group: trained (None) or dropped."""
        if self.fates[record.group_id] != LIVE:
            raise AssertionError(f"group {record.group_id} ends twice")
        if reason is None:
            self.fates[record.group_id] = TRAINED
            self.tokens["trained"] += record.num_tokens
        else:
            self.fates[record.group_id] = DROP_REASONS.index(reason) + 2
            self.dropped_tokens[reason] += record.num_tokens

    def fate(self, group_id: int) -> str | None:
        """ "live", "trained" or a drop reason; None for an id that was never granted."""
        if not 0 <= group_id < len(self.fates):
            return None
        code = self.fates[group_id]
        return ("live", "trained", *DROP_REASONS)[code]

    def reject(self, group: Group, verdict: Verdict) -> None:
        """A delivery that was not accepted."""
        self.tokens["received"] += group.num_tokens
        self.tokens[verdict.outcome] += group.num_tokens
        if verdict.outcome == "refused":
            self.refused[verdict.reason] += 1
        if verdict.reason == "cancelled":
            self._waste(group)

    def discard(self, record: Record, payload: Group, reason: DropReason) -> None:
        """A ready group is thrown away, "stale" or of no use to this life's method, though its prompt will be sampled again."""
        self.dropped_tokens[reason] += record.num_tokens
        record.num_tokens = 0
        self._waste(payload)

    def _waste(self, group: Group) -> None:
        # By length of the answer, so that a bias against long ones is seen.
        for trajectory in group.trajectories:
            length = trajectory.num_tokens
            self.wasted_tokens[f"<={1 << max(length - 1, 0).bit_length()}"] += length

    def balance(self, records: Iterable[Record]) -> dict[str, Any]:
        """All counts, and whether they add up; `records` are those of the groups still in the ledger."""
        states: Counter[str] = Counter()
        held: Counter[str] = Counter()
        ids: set[int] = set()
        for record in records:
            states[record.state.value] += 1
            held[record.state.value] += record.num_tokens
            ids.add(record.group_id)
        dropped = {reason: self.fates.count(i + 2) for i, reason in enumerate(DROP_REASONS)}
        groups = {"granted": len(self.fates)} | {state.value: states[state] for state in State}
        groups |= {"trained": self.fates.count(TRAINED)}
        tokens = {"received": self.tokens["received"], "ready": held["ready"], "taken": held["taken"]}
        tokens |= {kind: self.tokens[kind] for kind in ("trained", "refused", "duplicate")}
        dropped_tokens = {reason: self.dropped_tokens[reason] for reason in DROP_REASONS}
        balanced = (
            groups["granted"] == sum(groups.values()) - groups["granted"] + sum(dropped.values())
            and len(ids) == sum(states.values()) == self.fates.count(LIVE)
            and tokens["received"] == sum(tokens.values()) - tokens["received"] + sum(dropped_tokens.values())
            and held["waiting"] == held["leased"] == 0
            and self.attempts["issued"] == states["leased"] + sum(self.attempts[end] for end in ENDINGS)
        )
        return {
            "groups": groups | {"dropped": dropped},
            "tokens": tokens | {"dropped": dropped_tokens},
            "attempts": dict(self.attempts),
            "refused": dict(self.refused),
            "wasted_tokens": dict(self.wasted_tokens),
            "balanced": balanced,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"fates": bytes(self.fates)} | {name: dict(counter) for name, counter in self._counters().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fates = bytearray(state["fates"])
        for name, counter in self._counters().items():
            counter.clear()
            counter.update(state[name])

    def _counters(self) -> dict[str, Counter[str]]:
        names = ("tokens", "dropped_tokens", "attempts", "refused", "wasted_tokens")
        return {name: getattr(self, name) for name in names}


def in_words(books: dict[str, Any]) -> str:
    """The balance at the end of a run, in one line."""
    groups, tokens = books["groups"], books["tokens"]
    parts = [
        f"{groups['granted']} groups granted = {groups['trained']} trained + {_dropped(groups)}",
        f"{tokens['received']} tokens received = {tokens['trained']} trained + {_dropped(tokens)}"
        f" + {tokens['refused']} refused + {tokens['duplicate']} duplicate",
    ]
    return f"the books {'balance' if books['balanced'] else 'do NOT balance'}: {'; '.join(parts)}"


def _dropped(counts: dict[str, Any]) -> str:
    reasons = [f"{n} {reason}" for reason, n in counts["dropped"].items() if n]
    return f"{sum(counts['dropped'].values())} dropped" + (f" ({', '.join(reasons)})" if reasons else "")
