"""From taken groups to one Batch, and what there is to say about them. Pure but for the running scale of rewards.

Invariant: rows are keyed by group id, never by position; a trajectory that cannot be trained on has an empty mask, so it
is in no numerator and no denominator; lag is counted here, at consumption, from the version of every token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms import diagnostics, filters
from async_rl.algorithms.advantages import ADVANTAGES, comparable
from async_rl.config import Config
from async_rl.data.record import Record
from async_rl.data.scores import mean_scores
from async_rl.learner.update.shaping import RewardShaping
from async_rl.types import Batch, Group, Trajectory

PASS_AT = (1, 2, 4, 8, 16, 32)
NO_BOUND = 1 << 40  # versions; on_stale=train takes what comes


class Row(NamedTuple):
    group: Group
    trajectory: Trajectory
    left_out: str  # why it is not trained on, "" if it is; "greedy" for the baseline of remax


def assemble(records: list[Record], version: int, config: Config, shaping: RewardShaping) -> tuple[Batch, dict[str, object]]:
    """The batch of `records` for the learner at `version`, and the metrics that need whole groups."""
    a = config.algorithm
    rows = [row for record in records if record.payload is not None for row in _rows(record.payload, version, config)]
    valid_N = torch.tensor([not row.left_out for row in rows], dtype=torch.bool)
    rewards_N = torch.tensor([row.trajectory.reward for row in rows], dtype=torch.float64)
    if a.shuffle_rewards:
        rewards_N = _shuffled(rewards_N, valid_N, np.random.default_rng([config.seed, version]))
    lengths_N = torch.tensor([int(row.trajectory.mask.sum()) for row in rows], dtype=torch.int64)
    baseline_N = torch.tensor(
        [row.left_out == "greedy" and not filters.valid(row.trajectory) for row in rows], dtype=torch.bool
    )
    shaped_N = shaping.shaped(rewards_N, valid_N, lengths_N, baseline_N)
    greedy_N = _greedy(rows, shaped_N, baseline_N) if a.has_greedy else None
    advantages_N, keep_N = _compared(rows, shaped_N, valid_N, lengths_N, greedy_N, config)
    batch = _flatten(rows, version, shaped_N.numpy(), advantages_N.numpy(), keep_N.numpy())
    return batch, _metrics(rows, batch, shaped_N, keep_N.numpy(), config)


def _rows(group: Group, version: int, config: Config) -> list[Row]:
    """The siblings with what keeps them from being trained on."""
    a = config.algorithm
    trajectories, greedy = list(group.trajectories), a.has_greedy
    reasons = filters.group_reasons(
        trajectories[:-1] if greedy else trajectories,
        version=version,
        max_staleness=NO_BOUND if config.on_stale == "train" else config.max_staleness,
        drop_overlong=a.overlong == "mask",
        drop_zero_variance=a.zero_variance == "mask",
    )
    return [Row(group, t, why) for t, why in zip(trajectories, [*reasons, *["greedy"] * greedy], strict=True)]


def _greedy(rows: list[Row], shaped_N: Tensor, baseline_N: Tensor) -> Tensor:
    """The shaped reward of the greedy answer to the same prompt, float64 [N]; NaN where that has none."""
    found = {rows[k].group.group_id: shaped_N[k] for k in baseline_N.nonzero().flatten().tolist()}
    return torch.tensor([found.get(row.group.group_id, torch.nan) for row in rows], dtype=torch.float64)


def _compared(
    rows: list[Row], rewards_N: Tensor, valid_N: Tensor, lengths_N: Tensor, greedy_N: Tensor | None, config: Config
) -> tuple[Tensor, Tensor]:
    """(advantages against the siblings, float64 [N], 0 with a method that has none; bool [N], what is trained on)."""
    a = config.algorithm
    group_ids_N = torch.tensor([row.group.group_id for row in rows], dtype=torch.int64)
    name = "grpo" if a.advantage == "hybrid" else a.advantage
    if name not in ADVANTAGES:
        return torch.zeros_like(rewards_N), valid_N & rewards_N.isfinite()
    options = {"ddof": a.advantage_options["ddof"]} if "ddof" in a.advantage_options else {}
    args = (rewards_N, group_ids_N, valid_N)
    advantages_N = ADVANTAGES[name](*args, lengths_N=lengths_N, greedy_N=greedy_N, **options)
    return advantages_N, comparable(*args, greedy_N)


def _shuffled(rewards_N: Tensor, valid_N: Tensor, rng: np.random.Generator) -> Tensor:
    """Valid rewards permuted over the whole batch; the others stay where they are."""
    index = np.flatnonzero(valid_N.numpy())
    out = rewards_N.clone()
    out[torch.from_numpy(index)] = rewards_N[torch.from_numpy(rng.permutation(index))]
    return out


def _flatten(rows: list[Row], version: int, rewards_N: np.ndarray, advantages_N: np.ndarray, keep_N: np.ndarray) -> Batch:
    # A trajectory without tokens has nothing to score: it is counted by the metrics and left out of the batch.
    at = [k for k, row in enumerate(rows) if row.trajectory.num_tokens > 0]
    picked, keep = [rows[k] for k in at], keep_N[at]

    def joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)

    return Batch(
        ids=joined([part for row in picked for part in (row.group.prompt_ids, row.trajectory.token_ids)], np.int32),
        prompt_lengths=np.array([len(row.group.prompt_ids) for row in picked], np.int32),
        response_lengths=np.array([row.trajectory.num_tokens for row in picked], np.int32),
        logp_behav=joined([row.trajectory.logprobs for row in picked], np.float32),
        rewards=np.where(keep, rewards_N[at], 0.0),
        advantages=np.where(keep, advantages_N[at], 0.0),
        truncated=np.array([filters.overlong(row.trajectory) for row in picked], bool) & keep,
        mask=joined([row.trajectory.mask & bool(k) for row, k in zip(picked, keep, strict=True)], np.bool_),
        lags=joined([version - row.trajectory.versions for row in picked], np.int32),
        group_ids=np.array([row.group.group_id for row in picked], np.int64),
    )


def _metrics(rows: list[Row], batch: Batch, shaped_N: Tensor, keep_N: np.ndarray, config: Config) -> dict[str, object]:
    asked = [row for row in rows if row.left_out != "greedy"]
    good = [row.trajectory for row in asked if not filters.valid(row.trajectory)]
    rewards = np.array([t.reward for t in good])
    by_group: dict[int, list[float]] = {}
    for row in asked:
        by_group.setdefault(row.group.group_id, [])
        if not filters.valid(row.trajectory):
            by_group[row.group.group_id].append(row.trajectory.reward)
    sampled = np.ones(len(batch.lags), bool)
    out: dict[str, object] = {
        "reward/mean": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward/std": float(rewards.std()) if len(rewards) else float("nan"),
        "reward/num_invalid": len(asked) - len(good),
        "lag/mean": float(batch.lags.mean()) if len(batch.lags) else 0.0,
        "lag/max": int(batch.lags.max(initial=0)),
        "lag/hist": diagnostics.lag_histogram(batch.lags, sampled, config.max_staleness + 1),
        "batch/num_samples": len(asked),
        "batch/num_tokens": len(batch.lags),
        "staleness/versions_per_trajectory": float(np.mean([len(np.unique(t.versions)) for t in good])) if good else 0.0,
    }
    if config.algorithm.normalizer != "none" or config.algorithm.overlong_buffer_tokens:
        out["reward/shaped_mean"] = float(shaped_N[torch.from_numpy(keep_N)].mean()) if keep_N.any() else 0.0
    out |= {f"left_out/{why}": n for why, n in filters.count_reasons(row.left_out for row in asked).items()}
    out |= mean_scores(good, "score/")
    out |= diagnostics.groups(list(by_group.values()))
    out |= diagnostics.passes(list(by_group.values()), PASS_AT)
    out |= diagnostics.lengths([int(t.mask.sum()) for t in good], [t.finish_reason for t in good], [t.reward for t in good])
    return out
