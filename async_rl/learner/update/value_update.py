"""What the critic says of a batch, and how it learns from it: one optimizer step per mini-batch, targets on a running scale.

Owns the critic, its optimizer and PopArt. Imports torch, algorithms, and the learner's models. Invariants: values go in and
out in units of the return, whatever the scale inside; every rank runs the same collectives and holds the same scale; an
update that is not finite on any rank changes nothing on all of them.

Shape legend: R response tokens of the batch; T trainable tokens and E ends of cut answers in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from async_rl.algorithms import diagnostics
from async_rl.algorithms.aggregation import contribution
from async_rl.algorithms.critic import PopArt, popart_update, value_loss
from async_rl.config import Config
from async_rl.learner.update.critic import CriticModel, load_critic
from async_rl.learner.update.gradients import accumulate
from async_rl.learner.update.minibatches import Scored
from async_rl.learner.update.model import hf_named_parameters
from async_rl.learner.update.optim import Optimizer, num_optimizer_steps
from async_rl.learner.update.tally import Tally


def trains_critic(config: Config, step: int) -> bool:
    """Whether learner step `step`, counted from 0, has a critic: all steps or none, but with hybrid those from its start."""
    a = config.algorithm
    start = a.advantage_options["critic_start"] if a.advantage == "hybrid" else 0.0
    return a.has_critic and step >= start * config.num_steps


def make_value_update(
    config: Config, device: torch.device, mesh: DeviceMesh | None, group: dist.ProcessGroup | None
) -> ValueUpdate:
    """A critic that has learnt nothing yet, at any step, on all ranks alike. Raises what `load_critic` does."""
    critic = load_critic(config, device, mesh)
    named, lr = hf_named_parameters(critic), config.algorithm.critic.lr
    return ValueUpdate(config, critic, Optimizer(named, config.learner, lr, num_optimizer_steps(config)), group)


class ValueUpdate:
    """`group` (gloo) holds the learner's ranks in the order of the critic's mesh; None means a single process."""

    def __init__(self, config: Config, critic: CriticModel, optimizer: Optimizer, group: dist.ProcessGroup | None) -> None:
        self.config = config.algorithm.critic
        self.critic = critic
        self.optimizer = optimizer
        self.group = group
        self.num_ranks = dist.get_world_size(group) if group else 1
        self._popart_2 = torch.tensor(PopArt(), dtype=torch.float64)  # in place, so that a checkpoint loads into it

    @property
    def popart(self) -> PopArt:
        return PopArt(*self._popart_2.tolist())

    @property
    def told(self) -> str:
        """For the console: what its memory goes to."""
        num = sum(parameter.numel() for parameter in self.critic.parameters())
        taken = f"{16 * num / 2**20:.0f} MiB over all ranks, with gradients and moments"
        return f"a critic of {num / 1e6:.1f} M parameters is trained: {taken}"

    def values(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """(values_T, end_values_E), fp32: before each trainable token, and after the last one of each cut answer.

        One forward pass, with gradient where that is on. Collective.
        """
        rows, cols = torch.cat([scored.rows_T, scored.end_rows]), torch.cat([scored.cols_T, scored.end_cols])
        values = self.popart.sigma * self.critic(scored.ids_BL, rows, cols) + self.popart.mu
        if not torch.is_grad_enabled():
            self.critic.at_rest()  # no backward will give the gathered weights back, and they grow stale
        values_T, end_values_E = values.split([len(scored.rows_T), len(scored.end_rows)])
        return values_T, end_values_E

    @torch.no_grad()
    def rescale(self, moments_3: Tensor) -> None:
        """Move the scale towards the returns with these `whitening.moments`, over all ranks; values stay what they were.

        Once per batch, before its first update. With PopArt off the scale stays, as a checkpoint left it. Moments that are
        not finite are passed over: the loss will be so, too, and tells.
        """
        if self.config.popart == 0 or not moments_3.isfinite().all():
            return
        new, scale, shift = popart_update(self.popart, moments_3, beta=self.config.popart)
        self.critic.head.weight.mul_(scale)
        self.critic.head.bias.mul_(scale).add_(shift)
        self._popart_2.copy_(torch.tensor(new, dtype=torch.float64))

    def run(
        self,
        micro_batches: Iterable[tuple[bool, Scored]],
        num_tokens: int,
        old_values_R: Tensor,
        returns_R: Tensor,
        step: int,
        tally: Tally,
    ) -> str:
        """Train on one mini-batch of `num_tokens` trainable tokens over all ranks; "", or why nothing was changed. Collective.

        `micro_batches` are this rank's, each with whether it is the last. `old_values_R` are those before the batch's first
        update and `returns_R` its targets, both in units of the return and read only where this rank has trainable tokens.
        `step` counts optimizer steps. The tally gets the figures over all ranks, if the update was made.
        """
        if num_tokens == 0:
            return "no trainable token"

        def loss_of(scored: Scored, figures: Tally) -> Tensor:
            return self._loss(scored, num_tokens, old_values_R, returns_R, figures)

        names = ("value/loss", "value/grad_norm")
        figures, reason = accumulate(self.critic, self.optimizer, micro_batches, loss_of, self.group, names)
        if not reason:
            figures.add("value/lr", self.optimizer.step(step))
            tally.merge(figures)
        return reason

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, by key, sharing storage with the live ones."""
        return self.optimizer.tensors("critic", "critic_optim") | {"critic.popart": self._popart_2}

    def _loss(self, scored: Scored, num_tokens: int, old_values_R: Tensor, returns_R: Tensor, figures: Tally) -> Tensor:
        """`D S / N` of one micro-batch (algorithms.md §5, §7) on the running scale, with gradient."""
        mu, sigma = self.popart.mu, self.popart.sigma
        outputs_T = self.critic(scored.ids_BL, scored.rows_T, scored.cols_T)
        old_T, returns_T = old_values_R[scored.slots_T], returns_R[scored.slots_T]
        all_T = torch.ones_like(scored.slots_T, dtype=torch.bool)
        clip = None if self.config.clip is None else self.config.clip / sigma
        found = value_loss(outputs_T, (old_T - mu) / sigma, (returns_T - mu) / sigma, all_T, clip=clip)
        figures.collect(diagnostics.value(sigma * outputs_T.detach() + mu, returns_T, found.clipped, all_T))
        return contribution(found.loss, torch.ones_like(found.loss), all_T, self.num_ranks, num_tokens)
