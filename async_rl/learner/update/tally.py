"""Figures of one update: sums with counts, and maxima, merged over micro-batches, ranks and mini-batches.

Imports torch and algorithms.diagnostics. Invariant: every rank adds the same names in the same order, so that a
reduction is one collective on plain numbers; a mean is only taken at the end, never of means.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from async_rl.algorithms.diagnostics import Stats


class Tally:
    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}  # name -> [sum, count]
        self.maxima: dict[str, float] = {}

    def add(self, name: str, value: float, count: float = 1.0) -> None:
        pair = self.sums.setdefault(name, [0.0, 0.0])
        pair[0] += value
        pair[1] += count

    def collect(self, stats: Stats) -> None:
        """Add the figures of one micro-batch."""
        pairs = [x for pair in stats.means.values() for x in pair]
        numbers = torch.stack([x.double() for x in (*pairs, *stats.maxima.values())]).tolist()
        for k, name in enumerate(stats.means):
            self.add(name, numbers[2 * k], numbers[2 * k + 1])
        for name, value in zip(stats.maxima, numbers[len(pairs) :], strict=True):
            self.maxima[name] = max(self.maxima.get(name, -math.inf), value)

    def merge(self, other: Tally) -> None:
        """Add the figures of another mini-batch."""
        for name, (value, count) in other.sums.items():
            self.add(name, value, count)
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), value)

    def reduce_sums(self, group: dist.ProcessGroup | None, flags: list[bool]) -> tuple[Tally, list[int]]:
        """A tally whose sums are over all ranks (maxima still of this one), and on how many ranks each flag is up."""
        vector = torch.tensor([x for pair in self.sums.values() for x in pair] + [float(f) for f in flags], dtype=torch.float64)
        if group is not None:
            dist.all_reduce(vector, group=group)
        numbers = vector.tolist()
        reduced = Tally()
        reduced.sums = {name: numbers[2 * k : 2 * k + 2] for k, name in enumerate(self.sums)}
        reduced.maxima = dict(self.maxima)
        return reduced, [int(x) for x in numbers[len(numbers) - len(flags) :]]

    def reduce_maxima(self, group: dist.ProcessGroup | None) -> Tally:
        """The same tally, with maxima over all ranks."""
        if group is not None and self.maxima:
            vector = torch.tensor(list(self.maxima.values()), dtype=torch.float64)
            dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
            self.maxima = dict(zip(self.maxima, vector.tolist(), strict=True))
        return self

    def row(self) -> dict[str, float]:
        """Means and maxima by name; those of no token at all are left out."""
        means = {name: value / count for name, (value, count) in self.sums.items() if count}
        return means | {name: value for name, value in self.maxima.items() if math.isfinite(value)}
