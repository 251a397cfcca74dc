"""One learner step: from a batch that every rank holds to an updated policy, or to nothing at all.

Owns the loop over mini-batches and micro-batches. Imports torch, algorithms, data.packing and the policy's own modules.
Invariants: every rank runs the same forwards, backwards, callbacks and collectives, also with no token of its own; the
gradient does not depend on how tokens are spread over micro-batches and ranks; a step that is not finite on any rank
changes nothing on all of them.

Shape legend: N trajectories and R response tokens of the batch; T scored (trainable) tokens of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.algorithms import diagnostics
from async_rl.algorithms.aggregation import contribution, denominator, num_tokens_per_sequence, token_scales
from async_rl.algorithms.corrections import CORRECTIONS
from async_rl.algorithms.losses import LOSSES
from async_rl.algorithms.terms import Terms
from async_rl.config import Config
from async_rl.data.packing import microbatch, plan
from async_rl.learner.model import PolicyModel
from async_rl.learner.optim import PolicyOptimizer
from async_rl.learner.tally import Tally
from async_rl.types import Batch

Callback = Callable[[], None]


@dataclass(frozen=True)
class StepReport:
    """What a step did, equal on all ranks. `skipped`: the policy is exactly what it was, for `reason`."""

    skipped: bool
    reason: str  # "" unless a mini-batch was skipped
    metrics: dict[str, float]  # of the mini-batches that were applied; finite
    num_tokens: int  # trainable tokens of the batch


class MiniBatch(NamedTuple):
    """The share of this rank in one optimizer step."""

    micro: list[np.ndarray]  # int64 trajectory indices of each micro-batch; may be empty
    denominator: int  # N of algorithms.md §7, over all ranks


class Scored(NamedTuple):
    """One micro-batch, on the device; only trainable tokens are scored, so what is masked cannot matter."""

    ids_BL: Tensor
    rows_T: Tensor
    cols_T: Tensor
    targets_T: Tensor
    slots_T: Tensor  # index into the batch's [R] arrays
    sequence_T: Tensor  # index of the trajectory in the batch


class BatchTensors(NamedTuple):
    """What the loss needs of the batch, on the device."""

    logp_behav_R: Tensor
    advantages_R: Tensor
    fresh_R: Tensor  # bool, tokens of answers that the current version sampled alone, so on a KV cache of its own
    num_tokens_N: Tensor  # int64, trainable tokens of each trajectory


class PolicyUpdate:
    """`group` (gloo) holds the learner's ranks in the order of the policy's mesh; None means a single process."""

    def __init__(
        self, config: Config, policy: PolicyModel, optimizer: PolicyOptimizer, group: dist.ProcessGroup | None
    ) -> None:
        self.config = config
        self.policy = policy
        self.optimizer = optimizer
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        self.num_ranks = dist.get_world_size(group) if group else 1
        self.device = next(policy.parameters()).device

    def run(self, batch: Batch, step: int, boundary: Callback, before_update: Callback) -> StepReport:
        """Train on the batch; collective, with equal arguments on every rank.

        `step` counts the updates before this one (the policy version), and with it the schedules. `boundary` is called
        before each micro-batch, weights at rest; `before_update` before weights change, and only if they do.
        """
        tensors = self._tensors(batch)
        parts = self._mini_batches(batch, tensors.num_tokens_N, step)
        prox_R = self._proximal(batch, parts, boundary) if len(parts) > 1 else None
        total, reasons = Tally(), []
        for k, part in enumerate(parts):
            tally, reason = self._accumulate(batch, tensors, part, prox_R, boundary)
            if reason:
                self.optimizer.discard()
                reasons.append(reason)
                continue
            before_update()
            tally.add("lr", self.optimizer.step(step * len(parts) + k))
            if k == 0 and prox_R is not None:
                tally.maxima["ppo/first_minibatch_max_abs_log_r"] = tally.maxima["ppo/max_abs_log_r"]
            total.merge(tally)
        metrics = diagnostics.with_ess(total.reduce_maxima(self.group).row()) if len(reasons) < len(parts) else {}
        return StepReport(
            len(reasons) == len(parts), "; ".join(dict.fromkeys(reasons)), metrics, int(tensors.num_tokens_N.sum())
        )

    def _accumulate(
        self, batch: Batch, tensors: BatchTensors, part: MiniBatch, prox_R: Tensor | None, boundary: Callback
    ) -> tuple[Tally, str]:
        """Clipped gradients of one mini-batch, its figures over all ranks, and why it must be skipped, if it must."""
        tally = Tally()
        if part.denominator == 0:
            return tally, "no trainable token"
        # Each rank counts 1/D of this mini-batch, so that sums over ranks and micro-batches give its loss.
        tally.add("loss", 0.0, 1.0 / self.num_ranks)
        bad_losses = 0
        for last, scored in self._micro_batches(batch, part, boundary):
            self.policy.sync_gradients(last)
            loss = self._loss(scored, tensors, part.denominator, prox_R, tally)
            bad_losses += not math.isfinite(loss.item())
            loss.backward()
        norm = self.optimizer.clip()
        tally.add("policy/grad_norm", norm)
        bad_norm = not math.isfinite(norm)
        tally, (bad_losses, bad_norms) = tally.reduce_sums(self.group, [bad_losses > 0, bad_norm])
        if bad_losses or bad_norms:
            what = f"loss is not finite on {bad_losses}" if bad_losses else f"gradient norm is not finite on {bad_norms}"
            return tally, f"{what} of {self.num_ranks} ranks"
        return tally, ""

    def _loss(self, scored: Scored, tensors: BatchTensors, n: int, prox_R: Tensor | None, tally: Tally) -> Tensor:
        """`D S / N` of one micro-batch (algorithms.md §7, §3.3), with gradient; figures go to the tally."""
        c, slots_T = self.config.algorithm, scored.slots_T
        logp_T, entropy_T = self._forward(scored)
        prox_T = logp_T.detach() if prox_R is None else prox_R[slots_T]
        behav_T, all_T = tensors.logp_behav_R[slots_T], torch.ones_like(slots_T, dtype=torch.bool)
        sequences = (scored.sequence_T, len(tensors.num_tokens_N))
        weight_T = CORRECTIONS[c.correction](prox_T, behav_T, all_T, *sequences, low=None, high=c.correction_cap)
        terms = Terms(logp_T, prox_T, behav_T, tensors.advantages_R[slots_T], weight_T, all_T, *sequences)
        token_loss = LOSSES[c.loss](terms, eps_low=c.eps_low, eps_high=c.eps_high, dual_clip=c.dual_clip)
        scale_T = token_scales(c.aggregation, all_T, scored.sequence_T, tensors.num_tokens_N)
        loss = contribution(token_loss.loss, scale_T, all_T, self.num_ranks, n)
        tally.add("loss", loss.item() / self.num_ranks, 0.0)
        tally.collect(diagnostics.mismatch(prox_T, behav_T, all_T))
        tally.collect(diagnostics.mismatch(prox_T, behav_T, tensors.fresh_R[slots_T], "_lag0"))
        tally.collect(diagnostics.correction(prox_T, behav_T, weight_T, all_T))
        tally.collect(diagnostics.clipping(token_loss, logp_T, prox_T, all_T))
        tally.add("policy/entropy", entropy_T.double().sum().item(), len(slots_T))
        return loss

    def _forward(self, scored: Scored) -> tuple[Tensor, Tensor]:
        return self.policy(scored.ids_BL, scored.rows_T, scored.cols_T, scored.targets_T, self.config.rollout.temperature)

    @torch.no_grad()
    def _proximal(self, batch: Batch, parts: list[MiniBatch], boundary: Callback) -> Tensor:
        """Log-probs before the first update of this batch, [R] at the tokens this rank will train on, in the same packing."""
        prox_R = torch.zeros(len(batch.logp_behav), dtype=torch.float32, device=self.device)
        for part in parts:
            for _, scored in self._micro_batches(batch, part, boundary):
                prox_R[scored.slots_T] = self._forward(scored)[0]
                self.policy.at_rest()
        return prox_R

    def _micro_batches(self, batch: Batch, part: MiniBatch, boundary: Callback) -> Iterator[tuple[bool, Scored]]:
        """(is it the last, micro-batch) of this rank, with `boundary` called before each."""
        for k, indices in enumerate(part.micro):
            boundary()
            yield k == len(part.micro) - 1, _scored(batch, indices, self.device)

    def _mini_batches(self, batch: Batch, num_tokens_N: Tensor, step: int) -> list[MiniBatch]:
        """Groups dealt to the mini-batches, in random order when there are several; each packed for this rank."""
        c, count = self.config, self.config.algorithm.num_minibatches
        group_ids = np.array(list(dict.fromkeys(batch.group_ids.tolist())), np.int64)
        if count > 1:
            group_ids = np.random.default_rng((c.seed, step)).permutation(group_ids)
        lengths_N, tokens_N = batch.prompt_lengths + batch.response_lengths, num_tokens_N.cpu()
        parts = []
        for chosen in np.array_split(group_ids, count):
            indices = np.flatnonzero(np.isin(batch.group_ids, chosen))
            n = denominator(c.algorithm.aggregation, tokens_N[indices])
            indices = indices[tokens_N[indices].numpy() > 0]
            packed = plan(lengths_N[indices], self.num_ranks, c.learner.microbatch_tokens)[self.rank] if n else []
            parts.append(MiniBatch([indices[picked] for picked in packed], n))
        return parts

    def _tensors(self, batch: Batch) -> BatchTensors:
        sequence_R = torch.from_numpy(np.repeat(np.arange(batch.num_trajectories), batch.response_lengths))
        num_tokens_N = num_tokens_per_sequence(torch.from_numpy(batch.mask), sequence_R, batch.num_trajectories)
        zeros_N = torch.zeros(batch.num_trajectories, dtype=torch.int32)
        head_lags_N = zeros_N.index_reduce(0, sequence_R, torch.from_numpy(batch.lags), "amax")
        fresh_R = (head_lags_N == 0)[sequence_R]
        host = (torch.from_numpy(batch.logp_behav), torch.from_numpy(batch.advantages), fresh_R)
        return BatchTensors(*(x.to(self.device) for x in (*host, num_tokens_N)))


def _scored(batch: Batch, indices: np.ndarray, device: torch.device) -> Scored:
    micro = microbatch(batch, indices)
    trainable = batch.mask[micro.slots_R]
    flat = (x[trainable] for x in (micro.rows_R, micro.cols_R, micro.targets_R, micro.slots_R, micro.sequence_R))
    return Scored(*(torch.from_numpy(x).to(device) for x in (micro.ids_BL, *flat)))
