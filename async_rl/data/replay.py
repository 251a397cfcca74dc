"""The ledger of a replay: batches come as they were recorded, all at once, and nothing is granted.

Pure but for the source, which is an argument. Imports the other nouns of async_rl.data only. Invariant: every recorded group
is taken once and trained or dropped, and its books say so (`books()["balanced"]`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from async_rl.data.ledger import Ledger
from async_rl.data.record import Decode, DropReason, Encode, LedgerError, Record, Rules, State

Source = Callable[
    [], tuple[int, list[Record], int] | None
]  # (version it was taken at, batch, position behind it); None: no more


class ReplayLedger(Ledger):
    """`source` gives the batches in order; one is looked at ahead."""

    def __init__(self, rules: Rules, incarnation: int, version: int, source: Source) -> None:
        super().__init__(rules, incarnation, version)
        self.position = 0  # in the record, behind what was taken; kept by a checkpoint
        self._source = source
        self._ahead: tuple[int, list[Record], int] | None = None
        self._looked = False
        self._counts: Counter[str] = Counter()  # groups: taken ever, trained, dropped for a reason
        self._tokens: Counter[str] = Counter()  # the same in tokens

    @property
    def recorded(self) -> int | None:
        """The version at which the next batch was taken; None behind the last."""
        if not self._looked:
            self._ahead, self._looked = self._source(), True
        return self._ahead[0] if self._ahead else None

    def take(self, version: int) -> list[Record] | None:
        self._at(version)
        if self._shelves.of(State.TAKEN):
            raise LedgerError(f"take({version}): the batch taken before is neither trained nor skipped: settle it first")
        if self.recorded != version or self._ahead is None:
            raise LedgerError(f"take({version}): the next batch of the record was taken at version {self.recorded}")
        _, records, self.position = self._ahead
        self._ahead, self._looked = None, False
        for record in records:
            record.state, record.taken_version = State.TAKEN, version
            self._shelves.add(record)
            self._count("taken", record)
        return records

    def books(self) -> dict[str, Any]:
        """In the form of a run's: what a replay takes is what it was granted and has received."""
        records = self._shelves.records.values()
        groups, tokens = _sums(self._counts, len(records)), _sums(self._tokens, sum(record.num_tokens for record in records))
        balanced = all(
            all_of == each["taken"] + each["trained"] + sum(each["dropped"].values())
            for all_of, each in ((self._counts["taken"], groups), (self._tokens["taken"], tokens))
        )
        return {
            "groups": {"granted": self._counts["taken"], "waiting": 0, "leased": 0, "ready": 0} | groups,
            "tokens": {"received": self._tokens["taken"], "ready": 0, "refused": 0, "duplicate": 0} | tokens,
            "refused": {},
            "balanced": balanced,
        }

    def state_dict(self, encode: Encode) -> dict[str, Any]:
        return {
            "version": self.version,
            "resumes": [list(pair) for pair in self._timeline.resumes],
            "counts": dict(self._counts),
            "tokens": dict(self._tokens),
        }

    def load_state_dict(self, state: dict[str, Any], decode: Decode, more_answers: int = 0) -> None:
        if self.version != state["version"]:
            raise LedgerError(f"the saved ledger is at version {state['version']}, the model at {self.version}")
        self._timeline.extend(state["resumes"])
        self._counts, self._tokens = Counter(state["counts"]), Counter(state["tokens"])

    def _close(self, record: Record, reason: DropReason | None) -> None:
        self._shelves.remove(record)
        self._count(reason or "trained", record)

    def _count(self, what: str, record: Record) -> None:
        self._counts[what] += 1
        self._tokens[what] += record.num_tokens

    def _free_slots(self) -> None:
        self._unreleased.clear()  # nobody commits here


def _sums(counts: Counter[str], held: int) -> dict[str, Any]:
    dropped = {key: n for key, n in counts.items() if key not in ("taken", "trained")}
    return {"taken": held, "trained": counts["trained"], "dropped": dropped}
