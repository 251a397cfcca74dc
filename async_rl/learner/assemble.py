"""From taken groups to one Batch, and what there is to say about them. Pure: numpy and algorithms, no clock.

Invariant: rows are keyed by group id, never by position; a trajectory that cannot be compared has an empty mask, so it
is in no numerator and no denominator; lag is counted here, at consumption, from the version of every token.
"""

from __future__ import annotations

import numpy as np
import torch

from async_rl.algorithms import diagnostics, filters
from async_rl.algorithms.advantages import ADVANTAGES, comparable
from async_rl.config import AlgorithmConfig
from async_rl.data.record import Record
from async_rl.data.scores import mean_scores
from async_rl.types import Batch, Group, Trajectory


def assemble(
    records: list[Record], version: int, algorithm: AlgorithmConfig, max_staleness: int, seed: int
) -> tuple[Batch, dict[str, object]]:
    """The batch of `records` for the learner at `version`, and the metrics that need whole groups.

    `seed` only matters with `shuffle_rewards`.
    """
    groups = [record.payload for record in records if record.payload is not None]
    rows = [(group, trajectory) for group in groups for trajectory in group.trajectories]
    group_ids_N = torch.tensor([group.group_id for group, _ in rows], dtype=torch.int64)
    valid_N = torch.tensor([not filters.valid(t) for _, t in rows])
    rewards_N = torch.tensor([t.reward for _, t in rows], dtype=torch.float64)
    if algorithm.shuffle_rewards:
        rewards_N = _shuffled(rewards_N, valid_N, np.random.default_rng([seed, version]))
    advantages_N = ADVANTAGES[algorithm.advantage](rewards_N, group_ids_N, valid_N)
    keep_N = comparable(rewards_N, group_ids_N, valid_N)
    if algorithm.zero_variance == "mask":
        keep_N &= ~_flat(rewards_N, group_ids_N, keep_N)
    batch = _flatten(rows, version, advantages_N.numpy(), keep_N.numpy())
    return batch, _metrics(groups, rows, valid_N.numpy(), batch, max_staleness)


def _shuffled(rewards_N: torch.Tensor, valid_N: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Valid rewards permuted over the whole batch; the others stay where they are."""
    index = np.flatnonzero(valid_N.numpy())
    out = rewards_N.clone()
    out[torch.from_numpy(index)] = rewards_N[torch.from_numpy(rng.permutation(index))]
    return out


def _flat(rewards_N: torch.Tensor, group_ids_N: torch.Tensor, keep_N: torch.Tensor) -> torch.Tensor:
    """bool [N]: members of groups whose kept rewards are all equal."""
    flat_N = torch.zeros_like(keep_N)
    for group_id in group_ids_N.unique():
        member_N = group_ids_N == group_id
        flat_N |= member_N & filters.zero_variance(rewards_N[member_N & keep_N].numpy())
    return flat_N


def _flatten(rows: list[tuple[Group, Trajectory]], version: int, advantages_N: np.ndarray, keep_N: np.ndarray) -> Batch:
    # A trajectory without tokens has nothing to score: it is counted by the metrics and left out of the batch.
    picked = [(g, t, a, k) for (g, t), a, k in zip(rows, advantages_N, keep_N, strict=True) if t.num_tokens > 0]
    if not picked:
        empty = np.zeros(0, np.int32)
        none = np.zeros(0, np.float32)
        return Batch(empty, empty, empty, none, none, np.zeros(0, bool), empty, np.zeros(0, np.int64))
    return Batch(
        ids=np.concatenate([part for g, t, _, _ in picked for part in (g.prompt_ids, t.token_ids)]).astype(np.int32),
        prompt_lengths=np.array([len(g.prompt_ids) for g, _, _, _ in picked], np.int32),
        response_lengths=np.array([t.num_tokens for _, t, _, _ in picked], np.int32),
        logp_behav=np.concatenate([t.logprobs for _, t, _, _ in picked]).astype(np.float32),
        advantages=np.concatenate([np.full(t.num_tokens, a) for _, t, a, _ in picked]).astype(np.float32),
        mask=np.concatenate([t.mask & bool(k) for _, t, _, k in picked]),
        lags=np.concatenate([version - t.versions for _, t, _, _ in picked]).astype(np.int32),
        group_ids=np.array([g.group_id for g, _, _, _ in picked], np.int64),
    )


def _metrics(
    groups: list[Group], rows: list[tuple[Group, Trajectory]], valid_N: np.ndarray, batch: Batch, max_staleness: int
) -> dict[str, object]:
    good = [t for (_, t), ok in zip(rows, valid_N, strict=True) if ok]
    rewards = np.array([t.reward for t in good])
    sampled = np.ones(len(batch.lags), bool)
    out: dict[str, object] = {
        "reward/mean": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward/std": float(rewards.std()) if len(rewards) else float("nan"),
        "reward/num_invalid": len(rows) - len(good),
        "lag/mean": float(batch.lags.mean()) if len(batch.lags) else 0.0,
        "lag/max": int(batch.lags.max(initial=0)),
        "lag/hist": diagnostics.lag_histogram(batch.lags, sampled, max_staleness + 1),
        "batch/num_samples": len(rows),
        "batch/num_tokens": len(batch.lags),
        "staleness/versions_per_trajectory": float(np.mean([len(np.unique(t.versions)) for t in good])) if good else 0.0,
    }
    out |= mean_scores(good, "score/")
    out |= diagnostics.groups([[t.reward for t in g.trajectories if not filters.valid(t)] for g in groups])
    out |= diagnostics.lengths([int(t.mask.sum()) for t in good], [t.finish_reason for t in good], [t.reward for t in good])
    return out
