"""AdamW over one model: rate by schedule, gradients clipped by their global norm, state named for checkpoints.

Owns the optimizer state, on every rank its own shard. Imports torch, algorithms.schedules and config. Invariant: the
state exists from the start, so that a checkpoint before the first step has the same keys as any later one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from async_rl.algorithms.schedules import lr_at
from async_rl.config import Config, LearnerConfig


def num_optimizer_steps(config: Config) -> int:
    """Of either model over the whole run: learner steps times passes over a batch times mini-batches."""
    return config.num_steps * config.algorithm.num_epochs * config.algorithm.num_minibatches


class Optimizer:
    """`named` are the model's parameters as `hf_named_parameters` gives them; `lr` is the peak rate over `total_steps`."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], config: LearnerConfig, lr: float, total_steps: int) -> None:
        self.config = config
        self.lr = lr
        self.total_steps = total_steps
        self._named = named
        self._parameters = [parameter for _, parameter in named]
        self.adamw = torch.optim.AdamW(
            self._parameters, lr=lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
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

    def step(self, step: int, scale: float = 1.0) -> float:
        """Apply the gradients at `scale` times the rate of optimizer step `step`, counted from 0; returns that product."""
        c = self.config
        lr = scale * lr_at(step, self.total_steps, self.lr, c.warmup_fraction, c.hold_fraction, c.min_lr_ratio)
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

    def tensors(self, parameters: str, moments: str) -> dict[str, Tensor]:
        """All that a checkpoint must hold, sharing storage with the live ones, by keys that begin with these two words."""
        held = {f"{parameters}.{name}": parameter.detach() for name, parameter in self._named}
        return held | {f"{moments}.{name}": moment for name, moment in self.named_state().items()}


def policy_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """What a checkpoint holds of the policy, by key, sharing storage with the live ones."""
    return optimizer.tensors("model", "optim")
