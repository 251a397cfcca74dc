"""From a flat Batch to padded micro-batches: which trajectory runs on which rank, in which forward pass.

Numpy only, pure. Invariant: every trajectory is in exactly one micro-batch; every rank has the same number of them, since
each forward pass is a collective; and what is trained is exactly what the Batch's mask says, wherever its zeros stand.

Shape legend: N trajectories of the batch, B rows of a micro-batch, L its longest row, R response tokens of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from async_rl.types import Batch

# Attention costs as much as the rest of a layer at about 6 x the hidden size; 2048 is a usual one. Only balance rests on it.
ATTENTION_EVEN_TOKENS = 12288


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one rank, right-padded: under causal attention padding needs no attention mask.

    Without trajectories it is a single padding token and no response tokens: the rank still joins the collectives.
    """

    ids_BL: np.ndarray  # int64, prompt then response, 0 as padding
    rows_R: np.ndarray  # int64, row of each response token
    cols_R: np.ndarray  # int64, position whose hidden state scores it: one before the token itself
    targets_R: np.ndarray  # int64, the token
    slots_R: np.ndarray  # int64, its index in the Batch's flat response arrays
    sequence_R: np.ndarray  # int64, its trajectory's index in the Batch


def plan(lengths_N: np.ndarray, num_ranks: int, budget_tokens: int) -> list[list[np.ndarray]]:
    """[rank][micro-batch] -> int64 trajectory indices; `lengths_N` counts prompt and response tokens.

    Padding included, a micro-batch holds at most `budget_tokens`; a longer trajectory gets one of its own. Trajectories of
    like length share one, so an outlier pads no other. The ranks' k-th micro-batches cost about the same, as they run in
    lockstep. An array is empty where a rank has nothing left. Raises ValueError for less than one rank.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}: a batch needs at least one rank")
    lengths_N = np.asarray(lengths_N, np.int64)
    if len(lengths_N) == 0:
        return [[] for _ in range(num_ranks)]
    order_N = np.argsort(-lengths_N, kind="stable")
    costs_N = _costs(lengths_N[order_N])
    runs = _runs(lengths_N[order_N], costs_N, num_ranks, budget_tokens)
    weight = [float(costs_N[start] * (stop - start)) for start, stop in runs]
    return _deal([order_N[start:stop] for start, stop in runs], weight, num_ranks)


def microbatch(batch: Batch, indices: np.ndarray) -> MicroBatch:
    """The micro-batch of these trajectories. Raises ValueError for one without a prompt: nothing scores its first token."""
    indices = np.asarray(indices, np.int64)
    if len(indices) == 0:
        none = np.zeros(0, np.int64)
        return MicroBatch(np.zeros((1, 1), np.int64), none, none, none, none, none)
    prompts_N, responses_N = batch.prompt_lengths.astype(np.int64), batch.response_lengths.astype(np.int64)
    prompts_B, responses_B = prompts_N[indices], responses_N[indices]
    if prompts_B.min() < 1:
        raise ValueError(f"trajectory {indices[prompts_B.argmin()]} has an empty prompt: nothing scores its first token")
    totals_B = prompts_B + responses_B
    rows_T, cols_T = _ragged(totals_B)
    starts_N = _starts(prompts_N + responses_N)
    ids_BL = np.zeros((len(indices), int(totals_B.max())), np.int64)
    ids_BL[rows_T, cols_T] = batch.ids[starts_N[indices][rows_T] + cols_T]
    rows_R, t_R = _ragged(responses_B)
    positions_R = prompts_B[rows_R] + t_R
    return MicroBatch(
        ids_BL=ids_BL,
        rows_R=rows_R,
        cols_R=positions_R - 1,
        targets_R=ids_BL[rows_R, positions_R],
        slots_R=_starts(responses_N)[indices][rows_R] + t_R,
        sequence_R=indices[rows_R],
    )


def _costs(lengths: np.ndarray) -> np.ndarray:
    """Work of one row of each length, in tokens of the linear layers."""
    lengths = np.maximum(lengths, 1).astype(np.float64)
    return lengths * (1 + lengths / ATTENTION_EVEN_TOKENS)


def _runs(lengths_N: np.ndarray, costs_N: np.ndarray, num_ranks: int, budget_tokens: int) -> list[tuple[int, int]]:
    """Cut the descending lengths into runs: fewest rounds that the budget allows, then the smallest dearest run.

    One round is a run for each rank. Filling every run to the budget would leave the last ones nearly empty.
    """
    fewest = len(_fill(lengths_N, costs_N, budget_tokens, np.inf))
    wanted = min(len(lengths_N), -(-fewest // num_ranks) * num_ranks)
    low, high = float(costs_N[0]), float(costs_N.sum() + costs_N[0] * len(costs_N))
    best = _fill(lengths_N, costs_N, budget_tokens, high)
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        runs = _fill(lengths_N, costs_N, budget_tokens, middle)
        if len(runs) <= wanted:
            best, high = runs, middle
        else:
            low = middle
    return best


def _fill(lengths_N: np.ndarray, costs_N: np.ndarray, budget_tokens: int, max_cost: float) -> list[tuple[int, int]]:
    """Greedy runs over descending lengths, each within both limits, or of one row."""
    runs, start = [], 0
    while start < len(lengths_N):
        by_tokens = budget_tokens // max(1, int(lengths_N[start]))
        by_cost = len(lengths_N) if np.isinf(max_cost) else int(max_cost / costs_N[start] + 1e-9)
        stop = min(len(lengths_N), start + max(1, min(by_tokens, by_cost)))
        runs.append((start, stop))
        start = stop
    return runs


def _deal(runs: list[np.ndarray], weight: list[float], num_ranks: int) -> list[list[np.ndarray]]:
    """Give each rank one run per round: dearest runs together, and within a round the dearest to the least laden rank."""
    dealt: list[list[np.ndarray]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    ranked = sorted(range(len(runs)), key=lambda i: -weight[i])
    for start in range(0, len(ranked), num_ranks):
        round_ = ranked[start : start + num_ranks]
        for place, rank in enumerate(sorted(range(num_ranks), key=lambda r: load[r])):
            has_one = place < len(round_)
            dealt[rank].append(runs[round_[place]] if has_one else np.zeros(0, np.int64))
            load[rank] += weight[round_[place]] if has_one else 0.0
    return dealt


def _starts(lengths: np.ndarray) -> np.ndarray:
    """Where each piece begins in their concatenation."""
    return np.cumsum(lengths) - lengths


def _ragged(lengths_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row, position within the row) of every token, row after row."""
    rows = np.repeat(np.arange(len(lengths_B)), lengths_B)
    return rows, np.arange(len(rows)) - np.repeat(_starts(lengths_B), lengths_B)
