"""The policy on the learner's side: a Hugging Face model that scores given tokens, sharded with FSDP2.

Owns the forward pass, and how any model of the learner is loaded and sharded; imports torch, transformers, config and
weights. Invariant: parameters are fp32, dropout is off, attention is causal over right-padded rows without any mask, so what
follows a token never changes it.

Shape legend: B rows, L columns, R tokens to score, H hidden size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from async_rl.config import Config, LearnerConfig, ModelConfig
from async_rl.learner import LearnerError
from async_rl.learner.update.logprobs import token_logprobs
from async_rl.weights.pretrained import load_whole

_HF = "hf."  # where the Hugging Face model sits within a DecoderModel


class DecoderModel(nn.Module):
    """A Hugging Face model and what reads its hidden states: what the policy and the critic have in common."""

    def __init__(self, hf: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf.eval()  # dropout off; gradients do not depend on the mode (BR-033)

    @property
    def vocab_size(self) -> int:
        """Ids below it have an embedding."""
        embeddings = self.hf.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        return embeddings.num_embeddings

    @property
    def sharded(self) -> bool:
        return isinstance(self, FSDPModule)

    def at_rest(self) -> None:
        """Give back the gathered weights of a forward that had no backward. Not collective."""
        if isinstance(self, FSDPModule):
            self.reshard()

    def sync_gradients(self, on: bool) -> None:
        """Whether the next backward reduces gradients over the ranks, or adds them up where they are."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(on)


Model = TypeVar("Model", bound=DecoderModel)


class PolicyModel(DecoderModel):
    """Scores tokens under `hf` without ever holding their vocabulary-wide logits."""

    def __init__(self, hf: transformers.PreTrainedModel, chunk_tokens: int) -> None:
        super().__init__(hf)
        self.chunk_tokens = chunk_tokens

    def forward(
        self, ids_BL: torch.Tensor, rows_R: torch.Tensor, cols_R: torch.Tensor, targets_R: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logp_R, entropy_R), fp32: of targets_R given the tokens of row rows_R up to and with column cols_R."""
        hidden_BLH = self.hf.get_decoder()(input_ids=ids_BL, use_cache=False).last_hidden_state
        head = self.hf.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return token_logprobs(hidden_BLH[rows_R, cols_R], head.weight, targets_R, temperature, self.chunk_tokens)


def load_policy(config: Config, device: torch.device, mesh: DeviceMesh | None) -> PolicyModel:
    """The policy at `model.path`, on every rank alike; `mesh` None leaves it whole, 2-D means HSDP (replicate, shard).

    Raises ConfigError when the model cannot be loaded whole, LearnerError when it is too short or is not scored rightly.
    """
    hf = load_hf(config.model)
    check_positions(hf, config.model)
    policy = PolicyModel(hf, config.learner.logprob_chunk_tokens)
    _check_scoring(policy, config.model.path)
    return shard(policy, device, mesh)


def make_mesh(config: LearnerConfig, device: torch.device) -> DeviceMesh:
    """All ranks: one dimension to shard over, or two (HSDP): copies, and the shards of each copy. Collective."""
    if config.replicas == 1:
        return init_device_mesh(device.type, (config.ranks,))
    return init_device_mesh(
        device.type, (config.replicas, config.ranks // config.replicas), mesh_dim_names=("replicate", "shard")
    )


def shard(model: Model, device: torch.device, mesh: DeviceMesh | None) -> Model:
    """Move to the device and split over the mesh: every decoder layer by itself, the rest as the root."""
    if mesh is None:
        return model.to(device)
    mixed = MixedPrecisionPolicy()
    if device.type == "cuda":
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    names = set(model.hf._no_split_modules or ())
    for layer in [m for m in model.hf.modules() if type(m).__name__ in names]:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    # The output embeddings are used after the decoder returns and again first in backward: keep them gathered.
    fully_shard(model, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    return model


def hf_named_parameters(model: DecoderModel) -> list[tuple[str, nn.Parameter]]:
    """(Hugging Face name, parameter) in the model's order, tied weights once; DTensors when sharded."""
    model.at_rest()
    return [(name.removeprefix(_HF), parameter) for name, parameter in model.named_parameters()]


def load_hf(config: ModelConfig, key: str = "model.path") -> transformers.PreTrainedModel:
    """The Hugging Face model at `config.path`, whole, float32, on the CPU. Raises ConfigError or LearnerError, naming `key`."""
    path = Path(config.path)
    # "models/mine" may also be a hub name: it is a path if its first part is a folder here.
    local = path.is_absolute() or config.path.startswith(".") or Path(path.parts[0]).is_dir()
    if local and not (path / "config.json").is_file():
        raise LearnerError(f"{key} is {config.path}, where there is no config.json: give the folder of a Hugging Face model")
    hf = load_whole(config, key, dtype=torch.float32, attn_implementation="sdpa")
    if not isinstance(hf.get_output_embeddings(), nn.Linear):
        raise LearnerError(f"{key} is {config.path}, a {type(hf).__name__} without a linear output layer to score tokens with")
    return hf


def check_positions(hf: transformers.PreTrainedModel, config: ModelConfig, key: str = "model.path") -> None:
    """Raises LearnerError for a model that cannot see a whole answer."""
    longest = getattr(hf.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and longest < config.max_model_len:
        raise LearnerError(
            f"model.max_model_len is {config.max_model_len}, but {config.path} ({key}) knows {longest} positions: lower it"
        )


def _check_scoring(policy: PolicyModel, path: str) -> None:
    """Refuse a model whose logits are more than hidden states times output embeddings (bias, soft-capping, scaling)."""
    ids_1L = torch.arange(1, 9).remainder(policy.hf.config.get_text_config().vocab_size).unsqueeze(0)
    cols_R, targets_R = torch.arange(7), ids_1L[0, 1:]
    with torch.no_grad():
        logp_R, _ = policy(ids_1L, torch.zeros_like(cols_R), cols_R, targets_R, 1.0)
        logits_LV = policy.hf(input_ids=ids_1L, use_cache=False).logits[0].float()
    expected_R = logits_LV[:-1].log_softmax(-1).gather(1, targets_R.unsqueeze(1)).squeeze(1)
    off = (logp_R - expected_R).abs().max().item()
    if not off < 1e-3:
        raise LearnerError(
            f"model.path is {path}, a {type(policy.hf).__name__} whose log-probs come out {off:.2g} nat off: its output layer "
            "does more than multiply by the embeddings, which the learner does not support"
        )
