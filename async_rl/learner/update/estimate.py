"""What must be known of a batch before its first update: log-probs, values, and from them the advantages of every token.

Owns the pass without gradient. Imports torch, algorithms and the learner's own modules. Invariant: each rank scores its
share, the shares are added up, and all that follows is computed by every rank from the same arrays, so no statistic depends
on how the batch was dealt. The pass uses the packing of the training passes, so that a ratio starts at exactly 1.

Shape legend: N trajectories and R response tokens of the batch; T scored tokens of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.algorithms.corrections import CORRECTIONS, batch_sum
from async_rl.algorithms.gae import gae_decoupled, length_adaptive_lambda
from async_rl.algorithms.masks import m2po_squares, m2po_threshold
from async_rl.algorithms.reinforce import discounted_returns, reinforce_pp_baseline
from async_rl.algorithms.schedules import Hybrid, hybrid_at
from async_rl.algorithms.token_rewards import terminal_rewards, token_rewards_with_kl
from async_rl.algorithms.vtrace import vtrace
from async_rl.algorithms.whitening import blend, moments, whiten
from async_rl.config import Config
from async_rl.learner.update.minibatches import BatchTensors, Scored
from async_rl.learner.update.model import PolicyModel
from async_rl.learner.update.value_update import ValueUpdate

MicroBatches = Callable[[], Iterator[Scored]]


@dataclass
class Estimates:
    """Each [R] and equal on all ranks; what a method does not need is None."""

    advantages_R: Tensor
    logp_prox_R: Tensor | None = None
    logp_ref_R: Tensor | None = None
    values_R: Tensor | None = None  # in units of the return, before the first update
    returns_R: Tensor | None = None  # the critic's targets
    cuts: dict[str, Tensor] = field(default_factory=dict)  # m2po mask -> the largest square that stays
    weights: tuple[Tensor, Tensor] | None = None  # (sum, count) of the importance weights over the batch


def hybrid_of(config: Config, version: int) -> Hybrid:
    """Where the way from GRPO to PPO has come to at the step that leaves `version`."""
    o = config.algorithm.advantage_options
    fractions = {"grpo_end": o["grpo_end"], "ppo_start": o["ppo_start"]}
    clips = {"clip_grpo": o["clip_end"], "clip_start": o["clip_start"], "clip_end": o["clip_end"]}
    return hybrid_at(version, config.num_steps, **fractions, **clips)


def wants_proximal(config: Config) -> bool:
    """Whether proximal log-probs must be known before the first training pass, which otherwise has them itself."""
    a = config.algorithm
    several = a.num_minibatches * a.num_epochs > 1 and a.proximal == "recompute"
    in_reward = a.kl.beta > 0 and a.kl.into == "reward"
    return several or in_reward or a.advantage == "vtrace" or a.correction_normalize or any("m2po" in name for name in a.masks)


class Estimator:
    """`reference` is the frozen policy where a KL is taken to one."""

    def __init__(
        self, config: Config, policy: PolicyModel, reference: PolicyModel | None, group: dist.ProcessGroup | None
    ) -> None:
        self.config = config
        self.policy = policy
        self.reference = reference
        self.group = group

    def run(
        self, tensors: BatchTensors, micro_batches: MicroBatches, critic: ValueUpdate | None, version: int, kl_beta: float
    ) -> Estimates:
        """Collective. `micro_batches` gives this rank's share of the batch, as it will be trained on."""
        found = Estimates(tensors.advantages_N[tensors.sequence_R])
        ends_N = torch.zeros_like(tensors.rewards_N)
        if wants_proximal(self.config) or self.reference is not None or critic is not None:
            ends_N = self._score(tensors, micro_batches, critic, found)
        self._advantages(tensors, found, ends_N, version, kl_beta)
        self._whole_batch(tensors, found)
        return found

    @torch.no_grad()
    def _score(
        self, tensors: BatchTensors, micro_batches: MicroBatches, critic: ValueUpdate | None, found: Estimates
    ) -> Tensor:
        """Fills in log-probs and values; returns the values of the last states of answers that were cut, [N], else 0."""
        nothing_R = torch.zeros(len(tensors.mask_R), dtype=torch.float32, device=tensors.mask_R.device)
        prox_R = nothing_R.clone() if wants_proximal(self.config) else None
        ref_R = nothing_R.clone() if self.reference is not None else None
        values_R = nothing_R.clone() if critic is not None else None
        ends_N = torch.zeros_like(tensors.rewards_N, dtype=torch.float32)
        for scored in micro_batches():
            if prox_R is not None:
                prox_R[scored.slots_T] = forward(self.policy, scored, self.config)[0]
                self.policy.at_rest()
            if ref_R is not None and self.reference is not None:
                ref_R[scored.slots_T] = forward(self.reference, scored, self.config)[0]
                self.reference.at_rest()
            if values_R is not None and critic is not None:
                values_R[scored.slots_T], ends_N[scored.end_sequence] = critic.values(scored)
        found.logp_prox_R, found.logp_ref_R, found.values_R = self._added([prox_R, ref_R, values_R])
        (ends,) = self._added([ends_N])
        assert ends is not None
        return ends

    def _added(self, shares: list[Tensor | None]) -> list[Tensor | None]:
        """Over the ranks: at each place at most one of them is not 0."""
        if self.group is None:
            return shares
        sums: list[Tensor | None] = []
        for share in shares:
            if share is not None:
                host = share.cpu()
                dist.all_reduce(host, group=self.group)
                share = host.to(share.device)
            sums.append(share)
        return sums

    def _advantages(self, t: BatchTensors, found: Estimates, ends_N: Tensor, version: int, kl_beta: float) -> None:
        name, o = self.config.algorithm.advantage, self.config.algorithm.advantage_options
        if name == "reinforce_pp_baseline":
            found.advantages_R = reinforce_pp_baseline(t.advantages_N, t.mask_R, t.sequence_R)
        elif name == "reinforce_pp":
            rewards_R = self._token_rewards(t, found, kl_beta)
            returns_R = discounted_returns(rewards_R, t.mask_R, t.sequence_R, t.num_sequences, gamma=o["gamma"])
            found.advantages_R = whiten(returns_R, t.mask_R)
        elif found.values_R is not None:
            rewards_R = self._token_rewards(t, found, kl_beta)
            advantages_R, found.returns_R = self._with_critic(t, found, rewards_R, ends_N)
            if name == "hybrid":
                weight = hybrid_of(self.config, version).ppo_weight
                if weight > 0:
                    found.advantages_R = blend(found.advantages_R, advantages_R, t.mask_R, weight)
            else:
                found.advantages_R = whiten(advantages_R, t.mask_R) if o["whiten"] else advantages_R

    def _token_rewards(self, t: BatchTensors, found: Estimates, kl_beta: float) -> Tensor:
        if self.config.algorithm.kl.into != "reward" or found.logp_ref_R is None or found.logp_prox_R is None:
            return terminal_rewards(t.rewards_N, t.mask_R, t.sequence_R)
        logps = (found.logp_prox_R, found.logp_ref_R)
        return token_rewards_with_kl(t.rewards_N, *logps, t.mask_R, t.sequence_R, beta=kl_beta)

    def _with_critic(self, t: BatchTensors, found: Estimates, rewards_R: Tensor, ends_N: Tensor) -> tuple[Tensor, Tensor]:
        """(advantages, targets of the critic)."""
        o = self.config.algorithm.advantage_options
        assert found.values_R is not None
        args = (rewards_R, found.values_R, t.mask_R, t.sequence_R, ends_N)
        if self.config.algorithm.advantage == "vtrace":
            assert found.logp_prox_R is not None
            options = {name: o[name] for name in ("gamma", "lam", "rho_bar", "c_bar", "max_trace")}
            traced = vtrace(found.logp_prox_R, t.logp_behav_R, *args, pg_rho_bar=o["rho_bar"], **options)
            return (traced.pg_advantages if o["weighted"] else traced.advantages), traced.targets
        lam = length_adaptive_lambda(t.num_tokens_N, o["alpha"]) if o["lam_policy"] == "adaptive" else o["lam_policy"]
        return gae_decoupled(*args, gamma=o["gamma"], lam_policy=lam, lam_value=o["lam_value"])

    def _whole_batch(self, t: BatchTensors, found: Estimates) -> None:
        """What masks and weights need of all tokens at once."""
        a, prox_R = self.config.algorithm, found.logp_prox_R
        if prox_R is None:
            return
        for name in ("m2po", "m2po_all"):
            if name in a.masks:
                args = (prox_R, t.logp_behav_R, found.advantages_R, t.mask_R)
                found.cuts[name] = m2po_threshold(m2po_squares(*args, harmful_only=name == "m2po"), tau=a.masks[name]["tau"])
        if a.correction_normalize:
            sequences = (t.mask_R, t.sequence_R, t.num_sequences)
            weight_R = CORRECTIONS[a.correction](prox_R, t.logp_behav_R, *sequences, **bounds_of(config=self.config))
            found.weights = batch_sum(weight_R, *sequences, a.correction.partition("_")[0])

    def returns_moments(self, t: BatchTensors, found: Estimates) -> Tensor:
        """`moments` of the critic's targets, float64 [3]."""
        assert found.returns_R is not None
        return moments(found.returns_R, t.mask_R)


def forward(policy: PolicyModel, scored: Scored, config: Config) -> tuple[Tensor, Tensor]:
    """(logp_T, entropy_T) at the sampling temperature."""
    return policy(scored.ids_BL, scored.rows_T, scored.cols_T, scored.targets_T, config.rollout.temperature)


def bounds_of(config: Config) -> dict[str, float | None]:
    """The bounds of the importance weight, None where the mode has none."""
    return {"low": None, "high": None} | config.algorithm.correction_options
