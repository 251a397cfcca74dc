"""How one batch, which every rank holds, is dealt: to mini-batches, to ranks, to forward passes.

Owns the packed form that both models score. Imports torch, algorithms, data.packing. Invariants: the same on every rank
but for the share of each; every rank has as many forward passes as the others; a group is never split over mini-batches.

Shape legend: N trajectories and R response tokens of the batch; T scored (trainable) tokens of one micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms.aggregation import denominator, num_tokens_per_sequence
from async_rl.algorithms.losses import AGGREGATION_OF
from async_rl.config import AlgorithmConfig, Config
from async_rl.data.packing import microbatch, plan
from async_rl.types import Batch


class MiniBatch(NamedTuple):
    """The share of this rank in one optimizer step."""

    micro: list[np.ndarray]  # int64 trajectory indices of each micro-batch; may be empty
    denominator: int  # N of algorithms.md §7, over all ranks
    num_tokens: int  # trainable tokens, over all ranks: what averages over tokens divide by


class Scored(NamedTuple):
    """One micro-batch, on the device; only trainable tokens are scored, so what is masked cannot matter."""

    ids_BL: Tensor
    rows_T: Tensor
    cols_T: Tensor
    targets_T: Tensor
    slots_T: Tensor  # index into the batch's [R] arrays
    sequence_T: Tensor  # index of the trajectory in the batch
    end_rows: Tensor  # int64 [E]: row, last column and trajectory of each answer that the length limit cut
    end_cols: Tensor
    end_sequence: Tensor


class BatchTensors(NamedTuple):
    """What losses and estimators need of the batch, on the device."""

    logp_behav_R: Tensor
    mask_R: Tensor
    sequence_R: Tensor  # int64
    lags_R: Tensor
    fresh_R: Tensor  # bool, tokens of answers that the current version sampled alone, so on a KV cache of its own
    num_tokens_N: Tensor  # int64, trainable tokens of each trajectory
    rewards_N: Tensor
    advantages_N: Tensor
    group_ids_N: Tensor

    @property
    def num_sequences(self) -> int:
        return len(self.num_tokens_N)


def aggregation_of(algorithm: AlgorithmConfig) -> str:
    """As configured, else that of the loss's paper."""
    return algorithm.aggregation or AGGREGATION_OF.get(algorithm.loss, "token_mean")


def batch_tensors(batch: Batch, device: torch.device) -> BatchTensors:
    sequence_R = torch.from_numpy(np.repeat(np.arange(batch.num_trajectories), batch.response_lengths))
    mask_R, lags_R = torch.from_numpy(batch.mask), torch.from_numpy(batch.lags)
    num_tokens_N = num_tokens_per_sequence(mask_R, sequence_R, batch.num_trajectories)
    head_lags_N = torch.zeros(batch.num_trajectories, dtype=torch.int32).scatter_reduce(0, sequence_R, lags_R, "amax")
    by_token = (torch.from_numpy(batch.logp_behav), mask_R, sequence_R, lags_R, (head_lags_N == 0)[sequence_R])
    by_answer = (num_tokens_N, *(torch.from_numpy(x) for x in (batch.rewards, batch.advantages, batch.group_ids)))
    return BatchTensors(*(x.to(device) for x in (*by_token, *by_answer)))


def deal(config: Config, batch: Batch, num_tokens_N: Tensor, version: int, rank: int, num_ranks: int) -> list[MiniBatch]:
    """The optimizer steps of a batch in order: `num_minibatches` for each of `num_epochs`, every epoch dealt anew.

    Groups are dealt in random order when there are several mini-batches; each is packed for this rank.
    """
    c = config.algorithm
    group_ids = np.array(list(dict.fromkeys(batch.group_ids.tolist())), np.int64)
    parts = []
    for epoch in range(c.num_epochs):
        order = group_ids
        if c.num_minibatches > 1:
            order = np.random.default_rng((config.seed, version, epoch)).permutation(group_ids)
        for chosen in np.array_split(order, c.num_minibatches):
            parts.append(_mini_batch(config, batch, num_tokens_N.cpu(), chosen, rank, num_ranks))
    return parts


def _mini_batch(config: Config, batch: Batch, tokens_N: Tensor, group_ids: np.ndarray, rank: int, num_ranks: int) -> MiniBatch:
    indices = np.flatnonzero(np.isin(batch.group_ids, group_ids))
    ids_N = torch.from_numpy(batch.group_ids[indices])
    n = denominator(aggregation_of(config.algorithm), tokens_N[indices], group_ids_N=ids_N)
    indices = indices[tokens_N[indices].numpy() > 0]
    lengths_N = (batch.prompt_lengths + batch.response_lengths)[indices]
    packed = plan(lengths_N, num_ranks, config.learner.microbatch_tokens)[rank] if n else []
    return MiniBatch([indices[picked] for picked in packed], n, int(tokens_N[indices].sum()))


def scored(batch: Batch, indices: np.ndarray, device: torch.device) -> Scored:
    """The micro-batch of these trajectories."""
    micro = microbatch(batch, indices)
    trainable = batch.mask[micro.slots_R]
    flat = [x[trainable] for x in (micro.rows_R, micro.cols_R, micro.targets_R, micro.slots_R, micro.sequence_R)]
    cut = np.flatnonzero(batch.truncated[indices]) if len(indices) else np.zeros(0, np.int64)
    last = (batch.prompt_lengths + batch.response_lengths)[indices][cut].astype(np.int64) - 1
    ends = (cut, last, np.asarray(indices, np.int64)[cut])
    return Scored(*(torch.from_numpy(x).to(device) for x in (micro.ids_BL, *flat, *ends)))
