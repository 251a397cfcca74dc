"""AdamW over the policy: rate by schedule, gradients clipped by their global norm, state named for checkpoints.

Owns the optimizer state, on every rank its own shard. Imports torch, algorithms.schedules and config. Invariant: the
state exists from the start, so that a checkpoint before the first step has the same keys as any later one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from async_rl.algorithms.schedules import lr_at
from async_rl.config import LearnerConfig
from async_rl.learner.model import PolicyModel, hf_named_parameters


class PolicyOptimizer:
    """`total_steps` counts optimizer steps: learner steps times mini-batches."""

    def __init__(self, policy: PolicyModel, config: LearnerConfig, total_steps: int) -> None:
        self.config = config
        self.total_steps = total_steps
        self._named = hf_named_parameters(policy)
        self._parameters = [parameter for _, parameter in self._named]
        self.adamw = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        for parameter in self._parameters:
            self.adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter.detach()),
                "exp_avg_sq": torch.zeros_like(parameter.detach()),
            }

    def clip(self) -> float:
        """Scale the gradients to `max_grad_norm` at most; returns their norm before, over all ranks. Collective."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def step(self, step: int) -> float:
        """Apply the gradients at the rate of optimizer step `step`, counted from 0; returns that rate."""
        c = self.config
        lr = lr_at(step, self.total_steps, c.lr, c.warmup_fraction, c.hold_fraction, c.min_lr_ratio)
        for param_group in self.adamw.param_groups:
            param_group["lr"] = lr
        self.adamw.step()
        self.discard()
        return lr

    def discard(self) -> None:
        """Forget the gradients; parameters and moments stay as they are."""
        self.adamw.zero_grad(set_to_none=True)

    def named_state(self) -> dict[str, Tensor]:
        """The live moments and step counts, by `<Hugging Face name>.<moment>`."""
        return {f"{name}.{key}": value for name, p in self._named for key, value in self.adamw.state[p].items()}
