"""A tiny critic, targets for it, and the naive way to value states and to differentiate the loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from async_rl.config import Config
from async_rl.learner.update.critic import CriticModel, shard_critic
from async_rl.learner.update.minibatches import Scored, batch_tensors, deal, scored
from async_rl.learner.update.model import hf_named_parameters
from async_rl.learner.update.optim import Optimizer, num_optimizer_steps
from async_rl.learner.update.tally import Tally
from async_rl.learner.update.value_update import ValueUpdate
from async_rl.types import Batch

from .learner_cases import CPU, full, make_batch, make_config, make_policy, rows


def critic_config(critic: dict[str, Any] | None = None, learner: dict[str, Any] | None = None, **top: Any) -> Config:
    return make_config({"advantage": "gae", "critic": {"lr": 1e-3} | (critic or {})}, learner, **top)


def make_critic(
    mesh: DeviceMesh | None = None, seed: int = 0, fresh: bool = False, device: Any = CPU, **options: Any
) -> CriticModel:
    """Its head is random, unless `fresh`."""
    critic = CriticModel(make_policy(seed, **options).hf)
    if not fresh:
        torch.manual_seed(seed)
        nn.init.normal_(critic.head.weight, std=0.1)
        nn.init.constant_(critic.head.bias, 0.2)
    return shard_critic(critic, device, mesh)


def make_value_update(config: Config, critic: CriticModel, group: dist.ProcessGroup | None = None) -> ValueUpdate:
    named, total = hf_named_parameters(critic), num_optimizer_steps(config)
    return ValueUpdate(config, critic, Optimizer(named, config.learner, config.algorithm.critic.lr, total), group)


def with_ends(batch: Batch) -> Batch:
    """Every third answer was cut."""
    return dataclasses.replace(batch, truncated=np.arange(batch.num_trajectories) % 3 == 0)


def targets(batch: Batch, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(old values, returns), [R]; some of the old values are near enough to be kept by the clip, others are not."""
    rng = np.random.default_rng((seed, 1))
    old, returns = rng.normal(size=(2, len(batch.logp_behav)))
    return torch.from_numpy(old.astype(np.float32)), torch.from_numpy(returns)


def dealt(config: Config, batch: Batch, rank: int = 0, num_ranks: int = 1) -> tuple[list[tuple[bool, Scored]], int]:
    """This rank's micro-batches of the first optimizer step, and the trainable tokens of all ranks."""
    part = deal(config, batch, batch_tensors(batch, CPU).num_tokens_N, 0, rank, num_ranks)[0]
    last = len(part.micro) - 1
    return [(k == last, scored(batch, indices, CPU)) for k, indices in enumerate(part.micro)], part.num_tokens


def train(
    update: ValueUpdate, config: Config, batch: Batch, old_R: Tensor, returns_R: Tensor, step: int = 0
) -> tuple[str, dict[str, float]]:
    """(reason, figures) of one mini-batch."""
    rank = dist.get_rank(update.group) if update.group else 0
    micro, num_tokens = dealt(config, batch, rank, update.num_ranks)
    tally = Tally()
    reason = update.run(iter(micro), num_tokens, old_R, returns_R, step, tally)
    return reason, tally.reduce_maxima(update.group).row()


@torch.no_grad()
def values_of(update: ValueUpdate, config: Config, batch: Batch) -> tuple[Tensor, Tensor]:
    """([R], [N]) that this rank can say of its share, 0 elsewhere."""
    rank = dist.get_rank(update.group) if update.group else 0
    values_R, ends_N = torch.zeros(len(batch.logp_behav)), torch.zeros(batch.num_trajectories)
    for _, part in dealt(config, batch, rank, update.num_ranks)[0]:
        values_R[part.slots_T], ends_N[part.end_sequence] = update.values(part)
    return values_R, ends_N


def gradients_of(
    config: Config, critic: CriticModel, batch: Batch, group: dist.ProcessGroup | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients of one mini-batch, caught just before the update that uses them, and its figures."""
    update = make_value_update(config, critic, group)
    caught: dict[str, Tensor] = {}
    apply = update.optimizer.step

    def catch(step: int, scale: float = 1.0) -> float:
        for name, parameter in hf_named_parameters(critic):
            assert parameter.grad is not None, name
            caught[name] = full(parameter.grad)
        return apply(step, scale)

    update.optimizer.step = catch
    reason, figures = train(update, config, batch, *targets(batch))
    assert reason == "" and caught
    return caught, figures


def naive_values(critic: CriticModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """([R], [N]): before each response token, and after the last one, one trajectory at a time."""
    parts, ends = [], []
    for ids, prompt, _ in rows(batch):
        hidden_LH = critic.hf(input_ids=ids.unsqueeze(0)).last_hidden_state[0]
        values_L = hidden_LH @ critic.head.weight[0] + critic.head.bias
        parts.append(values_L[prompt - 1 : -1])
        ends.append(values_L[-1])
    return torch.cat(parts), torch.stack(ends)


def naive_gradients(critic: CriticModel, batch: Batch, clip: float | None) -> dict[str, Tensor]:
    """Of the mean over trainable tokens, all trajectories at once."""
    (old_R, returns_R), mask_R = targets(batch), torch.from_numpy(batch.mask)
    values_R, _ = naive_values(critic, batch)
    error_R = (values_R - returns_R) ** 2
    if clip is not None:
        bounded_R = torch.minimum(torch.maximum(values_R, old_R - clip), old_R + clip)
        error_R = torch.maximum(error_R, (bounded_R - returns_R) ** 2)
    loss = error_R[mask_R].sum() / 2 / mask_R.sum()
    named = hf_named_parameters(critic)
    return dict(zip([name for name, _ in named], torch.autograd.grad(loss, [p for _, p in named]), strict=True))


def state(update: ValueUpdate) -> dict[str, Tensor]:
    """Weights, moments and scale, whole."""
    return {key: full(tensor) for key, tensor in update.tensors().items()}


def first_token_task(seed: int, num_answers: int = 32) -> tuple[Batch, Tensor]:
    """A batch whose return is 1 where the prompt begins with a small id, else 0."""
    batch = make_batch(seed, num_groups=num_answers, group_size=1)
    return batch, torch.cat([torch.full((at.stop - at.start,), float(ids[0] < 50)) for ids, _, at in rows(batch)])
