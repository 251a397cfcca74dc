"""A tiny policy, batches for it, and the naive way to score and differentiate them: what the learner's tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from async_rl.config import Config, parse_config
from async_rl.learner.update.model import PolicyModel, hf_named_parameters, shard
from async_rl.learner.update.optim import Optimizer, num_optimizer_steps
from async_rl.learner.update.steering import Steering
from async_rl.learner.update.step import PolicyUpdate, StepReport
from async_rl.learner.update.value_update import ValueUpdate
from async_rl.types import Batch
from async_rl.weights.manifest import Manifest

CPU = torch.device("cpu")
VOCAB = 100


def make_config(algorithm: dict[str, Any] | None = None, learner: dict[str, Any] | None = None, **top: Any) -> Config:
    tree = {
        "num_steps": 20,
        "groups_per_step": 4,
        "group_size": 4,
        "model": {"path": "none", "max_model_len": 24},
        "rollout": {"max_new_tokens": 12, "temperature": 0.8},
        "learner": {"microbatch_tokens": 96, "logprob_chunk_tokens": 16, "lr": 1e-3, "max_grad_norm": 1e9} | (learner or {}),
        "algorithm": algorithm or {},
    }
    return parse_config(tree | top)


def make_policy(seed: int = 0, mesh: DeviceMesh | None = None, **options: Any) -> PolicyModel:
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
        # Larger than usual weights, so that log-probs differ from uniform and gradients from zero.
        "initializer_range": 0.15,
    }
    hf = Qwen3ForCausalLM(Qwen3Config(**(shape | options)))
    return shard(PolicyModel(hf, 16), CPU, mesh)


def make_batch(seed: int = 0, num_groups: int = 4, group_size: int = 4, masked_share: float = 0.1) -> Batch:
    rng = np.random.default_rng(seed)
    n = num_groups * group_size
    prompts, responses = rng.integers(2, 10, n).astype(np.int32), rng.integers(1, 12, n).astype(np.int32)
    num_response = int(responses.sum())
    return Batch(
        ids=rng.integers(1, VOCAB, int(prompts.sum()) + num_response).astype(np.int32),
        prompt_lengths=prompts,
        response_lengths=responses,
        logp_behav=-rng.random(num_response).astype(np.float32) * 6,
        rewards=rng.normal(size=n),
        advantages=rng.normal(size=n),
        truncated=np.arange(n) % 5 == 4,
        mask=rng.random(num_response) >= masked_share,
        lags=rng.integers(0, 3, num_response).astype(np.int32),
        group_ids=np.repeat(np.arange(num_groups, dtype=np.int64), group_size),
    )


def rows(batch: Batch) -> list[tuple[Tensor, int, slice]]:
    """(ids, prompt length, slots) of each trajectory, by a loop."""
    found, at, slot = [], 0, 0
    for p, r in zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True):
        found.append((torch.from_numpy(batch.ids[at : at + p + r].astype(np.int64)), p, slice(slot, slot + r)))
        at, slot = at + p + r, slot + r
    return found


def naive_logprobs(policy: PolicyModel, batch: Batch, temperature: float) -> Tensor:
    """[R], by the Hugging Face logits of one trajectory at a time."""
    parts = []
    for ids, prompt, _ in rows(batch):
        logits = policy.hf(input_ids=ids.unsqueeze(0)).logits[0, prompt - 1 : -1].float() / temperature
        parts.append(logits.log_softmax(-1).gather(1, ids[prompt:].unsqueeze(1)).squeeze(1))
    return torch.cat(parts)


def on_policy(policy: PolicyModel, batch: Batch, temperature: float) -> Batch:
    with torch.no_grad():
        logp = naive_logprobs(policy, batch, temperature).numpy().astype(np.float32)
    return dataclasses.replace(batch, logp_behav=logp, lags=np.zeros_like(batch.lags))


def make_update(
    config: Config,
    policy: PolicyModel,
    group: dist.ProcessGroup | None = None,
    reference: PolicyModel | None = None,
    critic: ValueUpdate | None = None,
) -> tuple[PolicyUpdate, Optimizer]:
    optimizer = Optimizer(hf_named_parameters(policy), config.learner, config.learner.lr, num_optimizer_steps(config))
    return PolicyUpdate(config, policy, optimizer, group, reference, critic), optimizer


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights(policy: PolicyModel) -> dict[str, Tensor]:
    return {name: full(parameter) for name, parameter in hf_named_parameters(policy)}


def flat_bytes(tensors: dict[str, Tensor], manifest: Manifest) -> bytes:
    """What must travel for these tensors, gaps included, by a loop."""
    stream = bytearray(manifest.num_bytes)
    for offset, spec in zip(manifest.offsets, manifest.tensors, strict=True):
        stream[offset : offset + spec.num_bytes] = tensors[spec.name].contiguous().numpy().tobytes()
    return bytes(stream)


def gradients_of(
    config: Config,
    policy: PolicyModel,
    batch: Batch,
    group: dist.ProcessGroup | None = None,
    boundary: Callable = lambda: None,
    reference: PolicyModel | None = None,
    critic: ValueUpdate | None = None,
) -> tuple[dict[str, Tensor], StepReport]:
    """Clipped gradients of the (last) mini-batch, caught just before the update that uses them."""
    caught: dict[str, Tensor] = {}

    def catch() -> None:
        for name, parameter in hf_named_parameters(policy):
            assert parameter.grad is not None, name
            caught[name] = full(parameter.grad)

    update, _ = make_update(config, policy, group, reference, critic)
    report = update.run(batch, 0, Steering(kl_beta=config.algorithm.kl.beta), boundary, catch)
    return caught, report


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Relative L2 distance over all tensors."""
    assert a.keys() == b.keys() and a
    off = sum(((a[k] - b[k]).double() ** 2).sum().item() for k in a)
    return (off / sum((b[k].double() ** 2).sum().item() for k in b)) ** 0.5 if off else 0.0
