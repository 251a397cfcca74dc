"""Where each unfinished group is: one shelf per state.

Owns the records and their moves. Imports async_rl.data.record only. Invariant: a record is on the shelf of its state and
on no other, and only the moves listed here exist.
"""

from __future__ import annotations

from async_rl.data.record import LedgerError, Record, State

MOVES = {
    State.WAITING: {State.LEASED, State.READY},  # READY: an attempt that had expired delivered after all
    State.LEASED: {State.READY, State.WAITING},
    State.READY: {State.TAKEN, State.WAITING},  # WAITING: cancelled for its age
    State.TAKEN: set(),
}
HOLDS_PAYLOAD = (State.READY, State.TAKEN)


class Shelves:
    """All unfinished groups by id, and by state."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self.held_bytes = 0  # of payloads
        self._of: dict[State, dict[int, Record]] = {state: {} for state in State}

    def of(self, state: State) -> dict[int, Record]:
        """The groups in that state, by id."""
        return self._of[state]

    def count(self, *states: State) -> int:
        return sum(len(self._of[state]) for state in states)

    def oldest(self, *states: State) -> Record | None:
        """The group of these states that was born first."""
        return min((r for state in states for r in self._of[state].values()), key=lambda r: r.age_order, default=None)

    def untaken(self) -> list[Record]:
        return [record for record in self.records.values() if record.state is not State.TAKEN]

    def add(self, record: Record) -> None:
        self.records[record.group_id] = self._of[record.state][record.group_id] = record
        if record.state in HOLDS_PAYLOAD:
            self.held_bytes += record.num_bytes

    def move(self, record: Record, state: State) -> None:
        """Raises LedgerError for a move that does not exist. A group that waits keeps neither holder nor payload."""
        if state not in MOVES[record.state]:
            raise LedgerError(f"group {record.group_id} cannot go from {record.state.value} to {state.value}")
        self.remove(record)
        record.state = state
        if state is State.WAITING:
            record.rollout_id, record.payload, record.num_bytes, record.num_tokens = None, None, 0, 0
        self.add(record)

    def remove(self, record: Record) -> None:
        del self.records[record.group_id]
        del self._of[record.state][record.group_id]
        if record.state in HOLDS_PAYLOAD:
            self.held_bytes -= record.num_bytes
