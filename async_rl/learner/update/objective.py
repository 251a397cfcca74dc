"""The scalar that one micro-batch differentiates: policy loss, what is left out of it, KL and entropy, and its figures.

Owns their order and their common count. Imports torch, algorithms. Invariant: every part is scaled `D S / N` by the same N,
counted before any token is left out (algorithms.md §7).

Shape legend: N trajectories and R response tokens of the batch; T scored tokens of one micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from async_rl.algorithms import diagnostics
from async_rl.algorithms.aggregation import contribution, token_scales
from async_rl.algorithms.corrections import CORRECTIONS, batch_normalised, cut
from async_rl.algorithms.kl import KL_LOSSES
from async_rl.algorithms.losses import LOSSES, WEIGHTED, TokenLoss
from async_rl.algorithms.masks import MASKS
from async_rl.algorithms.proximal import prox_logp_loglinear
from async_rl.algorithms.terms import Terms
from async_rl.config import Config
from async_rl.learner.update.estimate import Estimates, bounds_of, hybrid_of
from async_rl.learner.update.minibatches import BatchTensors, MiniBatch, Scored, aggregation_of
from async_rl.learner.update.tally import Tally


class Step(NamedTuple):
    """What is the same for all micro-batches of a batch."""

    tensors: BatchTensors
    estimates: Estimates
    version: int
    kl_beta: float
    rho_R: Tensor  # filled in by this rank as it goes: proximal over behavior probability; 0 where it has not scored


class Objective:
    def __init__(self, config: Config, num_ranks: int) -> None:
        self.config = config
        self.num_ranks = num_ranks
        self.aggregation = aggregation_of(config.algorithm)
        self.bounds = bounds_of(config)
        # Of a weight of 1, or one that the loss ignores, there is nothing to report.
        self.weighted = config.algorithm.loss in WEIGHTED and config.algorithm.correction != "none"

    def __call__(self, scored: Scored, step: Step, part: MiniBatch, logp_T: Tensor, entropy_T: Tensor, tally: Tally) -> Tensor:
        """`D S / N`, with gradient; figures go to the tally."""
        a, t = self.config.algorithm, step.tensors
        terms = self._terms(scored, step, logp_T)
        token_loss = LOSSES[a.loss](terms, **self._loss_options(step.version))
        keep_T = self._kept(terms, step, tally)
        groups = {"group_ids_N": t.group_ids_N, "max_tokens": self.config.rollout.max_new_tokens}
        scale_T = token_scales(self.aggregation, terms.mask_R, terms.sequence_R, t.num_tokens_N, **groups)
        loss = contribution(token_loss.loss, scale_T, keep_T, self.num_ranks, part.denominator)
        if step.kl_beta > 0 and a.kl.into != "reward":
            assert step.estimates.logp_ref_R is not None
            ref_T = step.estimates.logp_ref_R[scored.slots_T]
            kl_T = KL_LOSSES[a.kl.into](logp_T, ref_T, terms.logp_behav_R, terms.mask_R, a.kl.cap)
            loss = loss + step.kl_beta * contribution(kl_T, scale_T, terms.mask_R, self.num_ranks, part.denominator)
        if a.entropy_coef > 0:
            bonus = contribution(entropy_T, scale_T, terms.mask_R, self.num_ranks, part.denominator)
            loss = loss - a.entropy_coef * bonus
        tally.add("policy/entropy", entropy_T.detach().double().sum().item(), len(logp_T))
        self._figures(scored, step, terms, token_loss, tally)
        return loss

    def _terms(self, scored: Scored, step: Step, logp_T: Tensor) -> Terms:
        a, t, found, slots_T = self.config.algorithm, step.tensors, step.estimates, scored.slots_T
        behav_T, all_T = t.logp_behav_R[slots_T], torch.ones_like(slots_T, dtype=torch.bool)
        if found.logp_prox_R is not None:
            prox_T = found.logp_prox_R[slots_T]
        elif a.proximal == "loglinear":
            versions_T = step.version - t.lags_R[slots_T].long()
            # The step under way makes the version after the one that the batch was taken at.
            spans = {"prox_version": step.version, "current_version": step.version + 1}
            prox_T = prox_logp_loglinear(logp_T, behav_T, versions_T, all_T, **spans)
        else:
            prox_T = logp_T.detach()
        sequences = (scored.sequence_T, t.num_sequences)
        weight_T = CORRECTIONS[a.correction](prox_T, behav_T, all_T, *sequences, **self.bounds)
        if found.weights is not None:
            weight_T = batch_normalised(weight_T, *found.weights)
        advantages_T = found.advantages_R[slots_T].to(logp_T.dtype)
        return Terms(logp_T, prox_T, behav_T, advantages_T, weight_T, all_T, *sequences)

    def _loss_options(self, version: int) -> dict[str, float | None]:
        """As configured; on the way from GRPO to PPO the clip range is wider at first."""
        a = self.config.algorithm
        options = dict(a.loss_options)
        if a.advantage == "hybrid":
            factor = hybrid_of(self.config, version).clip / a.advantage_options["clip_end"]
            options |= {name: options[name] * factor for name in ("eps_low", "eps_high") if name in options}
        return options

    def _kept(self, terms: Terms, step: Step, tally: Tally) -> Tensor:
        """bool [T]: the tokens that no mask leaves out."""
        keep_T, cuts = terms.mask_R, step.estimates.cuts
        for name, options in self.config.algorithm.masks.items():
            one_T = MASKS[name](terms, cut=cuts[name]) if name in cuts else MASKS[name](terms, **options)
            tally.add(f"mask/{name}", (~one_T).double().sum().item(), len(one_T))
            keep_T = keep_T & one_T
        return keep_T

    def _figures(self, scored: Scored, step: Step, terms: Terms, token_loss: TokenLoss, tally: Tally) -> None:
        t, found, slots_T, all_T = step.tensors, step.estimates, scored.slots_T, terms.mask_R
        prox_T, behav_T, weight_T = terms.logp_prox_R, terms.logp_behav_R, terms.weight_R
        # A token of lag 0 in an answer that an older version began was sampled on that version's KV cache: not fresh.
        fresh_T = t.fresh_R[slots_T]
        lags_T = torch.where(fresh_T, 0, t.lags_R[slots_T].clamp(min=1))
        tally.collect(diagnostics.mismatch(prox_T, behav_T, all_T))
        tally.collect(diagnostics.mismatch_by_lag(prox_T, behav_T, all_T, lags_T, self.config.max_staleness + 1))
        tally.collect(diagnostics.ratio(prox_T, behav_T, all_T))
        whole = (terms.sequence_R, terms.num_sequences)
        if self.weighted:
            level, _, mode = self.config.algorithm.correction.partition("_")
            cuts = cut(prox_T, behav_T, all_T, *whole, level=level, mode=mode, **self.bounds)
            tally.collect(diagnostics.correction(weight_T, *cuts, all_T))
        used_T, cap = (weight_T, self.bounds["high"]) if self.weighted else (None, None)
        tally.collect(diagnostics.sequence_correction(prox_T, behav_T, used_T, all_T, *whole, cap=cap))
        tally.collect(diagnostics.clipping(token_loss, terms.logp_R, prox_T, all_T))
        if "eps_low" in self.config.algorithm.loss_options:
            eps = {name: x for name, x in self._loss_options(step.version).items() if name.startswith("eps") and x is not None}
            tally.collect(diagnostics.outside(terms.logp_R, prox_T, all_T, **eps))
        if found.logp_ref_R is not None:
            tally.collect(diagnostics.reference(prox_T, found.logp_ref_R[slots_T], all_T, terms.sequence_R))
        step.rho_R[slots_T] = CORRECTIONS["token_none"](prox_T, behav_T, all_T, *whole, low=None, high=None).float()
