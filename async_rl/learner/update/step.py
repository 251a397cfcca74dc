"""One learner step: from a batch that every rank holds to an updated policy, or to nothing at all.

Owns the order of the passes: estimates, then for each mini-batch the critic and the policy. Imports torch, algorithms and
the learner's own modules. Invariants: every rank runs the same forwards, backwards, callbacks and collectives, also with no
token of its own; the gradient does not depend on how tokens are spread over micro-batches and ranks; a mini-batch that is
not finite on any rank changes nothing on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.algorithms import diagnostics
from async_rl.algorithms.schedules import vcpo_lr_scale
from async_rl.config import Config
from async_rl.learner.update.estimate import Estimator, forward
from async_rl.learner.update.gradients import accumulate
from async_rl.learner.update.minibatches import MiniBatch, Scored, batch_tensors, deal, scored
from async_rl.learner.update.model import PolicyModel
from async_rl.learner.update.objective import Objective, Step
from async_rl.learner.update.optim import Optimizer
from async_rl.learner.update.steering import Steering
from async_rl.learner.update.tally import Tally
from async_rl.learner.update.value_update import ValueUpdate
from async_rl.types import Batch

Callback = Callable[[], None]
MicroBatches = Iterable[tuple[bool, Scored]]  # (is it the last, micro-batch)


@dataclass(frozen=True)
class StepReport:
    """What a step did, equal on all ranks. `skipped`: the policy is exactly what it was, for `reason`."""

    skipped: bool
    reason: str  # "" unless a mini-batch was skipped
    metrics: dict[str, float]  # of the mini-batches that were applied; finite
    num_tokens: int  # trainable tokens of the batch
    warm_up: bool = False  # only the critic learnt: there is a new version, of the same policy


class PolicyUpdate:
    """`group` (gloo) holds the learner's ranks in the order of the policy's mesh; None means a single process. `critic` may
    come to life at any step, on all ranks alike."""

    def __init__(
        self,
        config: Config,
        policy: PolicyModel,
        optimizer: Optimizer,
        group: dist.ProcessGroup | None,
        reference: PolicyModel | None = None,
        critic: ValueUpdate | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.optimizer = optimizer
        self.group = group
        self.critic = critic
        self.rank = dist.get_rank(group) if group else 0
        self.num_ranks = dist.get_world_size(group) if group else 1
        self.device = next(policy.parameters()).device
        self.estimator = Estimator(config, policy, reference, group)
        self.objective = Objective(config, self.num_ranks)

    def run(self, batch: Batch, version: int, steering: Steering, boundary: Callback, before_update: Callback) -> StepReport:
        """Train on the batch; collective, with equal arguments on every rank.

        `version` counts the updates before this one, and with it the schedules. `boundary` is called before each
        micro-batch, weights at rest; `before_update` before weights change, and only if they may.
        """
        tensors = batch_tensors(batch, self.device)
        parts = deal(self.config, batch, tensors.num_tokens_N, version, self.rank, self.num_ranks)
        if not any(part.denominator for part in parts):
            return StepReport(True, "no trainable token", {}, 0)

        def whole() -> Iterator[Scored]:
            for part in parts[: self.config.algorithm.num_minibatches]:
                yield from (micro for _, micro in self._micro_batches(batch, part, boundary))

        found = self.estimator.run(tensors, whole, self.critic, version, steering.kl_beta)
        step = Step(tensors, found, version, steering.kl_beta, torch.zeros_like(tensors.logp_behav_R))
        total, values, warm_up = Tally(), Tally(), self._warms_up(version)
        reasons: list[str] = []
        if self.critic is not None:
            self.critic.rescale(self.estimator.returns_moments(tensors, found))
        for at, part in enumerate(parts, version * len(parts)):
            reason = self._value(self._micro_batches(batch, part, boundary), part, step, at, values)
            if not warm_up:  # without its critic the policy learns on from the values that were
                micro_batches = self._micro_batches(batch, part, boundary)
                reason = self._policy(micro_batches, part, step, at, steering, before_update, total)
            reasons += [reason] * bool(reason)
        if warm_up:
            before_update()  # the version goes on, with the weights as they are
        total.merge(values)
        return replace(self._report(total, step, reasons, len(parts)), warm_up=warm_up)

    def _warms_up(self, version: int) -> bool:
        return self.critic is not None and version < self.config.algorithm.critic.warmup_steps

    def _value(self, micro_batches: MicroBatches, part: MiniBatch, step: Step, at: int, tally: Tally) -> str:
        """One optimizer step of the critic, if there is one; why it was skipped, if it was."""
        found = step.estimates
        if self.critic is None or part.num_tokens == 0:
            return ""
        assert found.values_R is not None and found.returns_R is not None
        reason = self.critic.run(micro_batches, part.num_tokens, found.values_R, found.returns_R, at, tally)
        tally.add("value/skipped_frac", float(bool(reason)))
        return reason

    def _policy(
        self,
        micro_batches: MicroBatches,
        part: MiniBatch,
        step: Step,
        at: int,
        steering: Steering,
        before_update: Callback,
        total: Tally,
    ) -> str:
        """One optimizer step of the policy; why it was skipped, if it was."""
        if part.denominator == 0:
            return "no trainable token"

        def loss_of(micro: Scored, tally: Tally) -> Tensor:
            return self.objective(micro, step, part, *forward(self.policy, micro, self.config), tally)

        names = ("loss", "policy/grad_norm")
        tally, reason = accumulate(self.policy, self.optimizer, micro_batches, loss_of, self.group, names)
        if reason:
            return reason
        (norm, _) = tally.sums["policy/grad_norm"]
        tally.add("policy/grad_norm_clipped_frac", float(norm > self.num_ranks * self.config.learner.max_grad_norm))
        before_update()
        tally.add("lr", self.optimizer.step(at, steering.lr_scale * self._ess_scale(tally)))
        if (
            at % (self.config.algorithm.num_minibatches * self.config.algorithm.num_epochs) == 0
            and step.estimates.logp_prox_R is not None
        ):
            tally.maxima["ppo/first_minibatch_max_abs_log_r"] = tally.maxima["ppo/max_abs_log_r"]
        total.merge(tally)
        return ""

    def _ess_scale(self, tally: Tally) -> float:
        """VCPO, arXiv:2602.17616; the sums are already those of all ranks."""
        if not self.config.learner.lr_by_ess:
            return 1.0
        (total, count), (squares, _) = (tally.sums[f"is/seq_ratio_{name}"] for name in ("mean", "sq_mean"))
        return vcpo_lr_scale(diagnostics.ess(total / count, squares / count))

    def _report(self, total: Tally, step: Step, reasons: list[str], num_parts: int) -> StepReport:
        metrics: dict[str, float] = {}
        if len(reasons) < num_parts:
            row = total.reduce_maxima(self.group).row() | self._percentiles(step)
            metrics = diagnostics.with_explained_variance(diagnostics.with_ess(row))
        num_tokens = int(step.tensors.num_tokens_N.sum())
        return StepReport(len(reasons) == num_parts, "; ".join(dict.fromkeys(reasons)), metrics, num_tokens)

    def _percentiles(self, step: Step) -> dict[str, float]:
        """Of proximal over behavior probability, over all trained tokens of all ranks with a finite one."""
        rho_R = torch.where(step.rho_R.isfinite(), step.rho_R, 0).cpu()
        if self.group is not None:
            # Not a sum: in another epoch a token may have been dealt to another rank.
            dist.all_reduce(rho_R, op=dist.ReduceOp.MAX, group=self.group)
        return diagnostics.ratio_percentiles(rho_R[rho_R > 0].numpy(), "is/ratio")

    def _micro_batches(self, batch: Batch, part: MiniBatch, boundary: Callback) -> Iterator[tuple[bool, Scored]]:
        """(is it the last, micro-batch) of this rank, with `boundary` called before each."""
        for k, indices in enumerate(part.micro):
            boundary()
            yield k == len(part.micro) - 1, scored(batch, indices, self.device)
