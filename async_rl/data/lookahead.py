"""The look-ahead: which untaken groups could no longer be taken within the staleness bound.

Owns one rule, design.md 5.3. Imports async_rl.data.record only. Invariant: if `overdue` is empty and every group arrives,
taking oldest first keeps it empty, step after step; so a learner that waits for it waits for something that can come.
"""

from __future__ import annotations

from collections.abc import Iterable

from async_rl.data.record import Record, Rules


def overdue(rules: Rules, next_step: int, untaken: Iterable[Record]) -> list[Record]:
    """The groups that find no place when the steps from `next_step` on take the untaken ones oldest first.

    A group born at b can be taken up to the step at version b + S (or the run's last). So for every k, those born at
    <= next_step - 1 - S + k must number at most the sum of G(next_step), ..., G(next_step + k - 1): checked at each group,
    in order of age, which is the same. O(n log n).
    """
    places: dict[int, int] = {}
    late: list[Record] = []
    num_placed = 0
    for record in sorted(untaken, key=lambda r: r.age_order):
        if record.born not in places:
            places[record.born] = rules.window(next_step, record.born + rules.max_staleness)
        if num_placed < places[record.born]:
            num_placed += 1
        else:
            late.append(record)
    return late
