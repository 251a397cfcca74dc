"""Ways to train that must give the same step whatever the packing and the number of ranks; batches, usual and odd."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from async_rl.learner.update.model import hf_named_parameters
from async_rl.learner.update.steering import Steering
from async_rl.learner.update.step import PolicyUpdate, StepReport
from async_rl.types import Batch

from .critic_cases import make_critic, make_value_update
from .learner_cases import full, make_batch, make_config, make_policy, make_update, on_policy

METHODS: dict[str, dict[str, Any]] = {
    "token_mean": {"aggregation": "token_mean"},
    "seq_mean_token_mean": {"aggregation": "seq_mean_token_mean"},
    "seq_mean_token_sum": {"aggregation": "seq_mean_token_sum"},
    "seq_mean_token_sum_norm": {"aggregation": "seq_mean_token_sum_norm"},
    "prompt_mean": {"aggregation": "prompt_mean"},
    "gae": {"advantage": "gae", "critic": {"lr": 1e-3}},
    "reinforce_pp": {"advantage": "reinforce_pp"},
    "kl in the loss": {"kl": {"beta": 0.1}},
    "kl in the reward": {"advantage": "reinforce_pp", "kl": {"beta": 0.1, "into": "reward"}},
    "entropy": {"entropy_coef": 0.05},
    "sequences": {"correction": "sequence_truncate", "masks": {"veto": {"threshold": 0.6}, "m2po": {}, "m2po_all": {}}},
    "two mini-batches": {"num_minibatches": 2},
    "two epochs": {"num_epochs": 2},
    "two of both": {"num_minibatches": 2, "num_epochs": 2, "aggregation": "prompt_mean"},
}


def method_update(
    name: str, budget_tokens: int, group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None
) -> PolicyUpdate:
    """With a reference of other weights and a critic where the method needs them."""
    config = make_config(METHODS[name], {"microbatch_tokens": budget_tokens})
    reference = make_policy(7, mesh) if config.algorithm.has_reference else None
    critic = make_value_update(config, make_critic(mesh), group) if config.algorithm.has_critic else None
    return make_update(config, make_policy(mesh=mesh), group, reference, critic)[0]


def step_of(update: PolicyUpdate, batch: Batch, version: int = 0) -> tuple[dict[str, Tensor], StepReport]:
    """Gradients of every optimizer step of the policy, by its number and the parameter's name, and the report."""
    named, caught = hf_named_parameters(update.policy), {}

    def catch() -> None:
        at = len(caught) // len(named)
        for name, parameter in named:
            assert parameter.grad is not None, name
            caught[f"{at} {name}"] = full(parameter.grad)

    steering = Steering(kl_beta=update.config.algorithm.kl.beta)
    return caught, update.run(batch, version, steering, lambda: None, catch)


def near_batch(seed: int = 1, **options: Any) -> Batch:
    """Sampled by policies that were near: masks leave out some tokens, not all."""
    batch = make_batch(seed, **options)
    sampled = on_policy(make_policy(), batch, 0.8).logp_behav
    noise = np.random.default_rng((seed, 2)).normal(0, 0.3, len(sampled))
    return dataclasses.replace(batch, logp_behav=(sampled + noise).astype(np.float32))


def far_batch() -> Batch:
    """One token had a behavior log-prob of -200."""
    batch = near_batch()
    first = np.arange(len(batch.mask)) == np.flatnonzero(batch.mask)[0]
    return dataclasses.replace(batch, logp_behav=np.where(first, np.float32(-200), batch.logp_behav))


def equal_batch() -> Batch:
    """All answers are as good as the others."""
    batch = near_batch()
    return dataclasses.replace(batch, rewards=np.ones_like(batch.rewards), advantages=np.zeros_like(batch.advantages))


def one_token_batch() -> Batch:
    """One group of two answers of one token each."""
    return Batch(
        ids=np.array([5, 6, 7, 5, 6, 8], np.int32),
        prompt_lengths=np.array([2, 2], np.int32),
        response_lengths=np.array([1, 1], np.int32),
        logp_behav=np.array([-4.0, -5.0], np.float32),
        rewards=np.array([1.0, 0.0]),
        advantages=np.array([0.7, -0.7]),
        truncated=np.array([False, True]),
        mask=np.array([True, True]),
        lags=np.zeros(2, np.int32),
        group_ids=np.zeros(2, np.int64),
    )


ODD = {"far": far_batch, "equal": equal_batch, "one token": one_token_batch}


def all_finite(grads: dict[str, Tensor], report: StepReport) -> bool:
    return all(torch.isfinite(g).all() for g in grads.values()) and all(np.isfinite(x) for x in report.metrics.values())
