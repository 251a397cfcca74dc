"""The critic on the learner's side: a Hugging Face decoder that says what a state is worth, sharded with FSDP2.

Owns its head and its forward pass; imports torch, transformers, config and model. Invariants: the head is computed in
fp32 and says 0 everywhere before the first update; the value of a state sees its tokens and none that follow.

Shape legend: B rows, L columns, R states to value, H hidden size.
"""

from __future__ import annotations

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from async_rl.config import Config
from async_rl.learner import LearnerError
from async_rl.learner.update.model import DecoderModel, check_positions, load_hf, shard


class CriticModel(DecoderModel):
    """The decoder of `causal`, under an output of one number instead of its own."""

    def __init__(self, causal: transformers.PreTrainedModel) -> None:
        super().__init__(causal.get_decoder())
        output = causal.get_output_embeddings()
        assert isinstance(output, nn.Linear)
        self.head = nn.Linear(output.in_features, 1)
        # Random values would be noise in the first advantages; from 0 the head learns first, and the decoder with it.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids_BL: torch.Tensor, rows_R: torch.Tensor, cols_R: torch.Tensor) -> torch.Tensor:
        """values_R, fp32: of the state after the tokens of row rows_R up to and with column cols_R."""
        hidden_BLH = self.hf(input_ids=ids_BL, use_cache=False).last_hidden_state
        return self.head(hidden_BLH[rows_R, cols_R].float()).squeeze(-1)


def load_critic(config: Config, device: torch.device, mesh: DeviceMesh | None) -> CriticModel:
    """The critic from `algorithm.critic.path`, or else `model.path`, on every rank alike; `mesh` as in `load_policy`.

    Raises ConfigError when the model cannot be loaded whole, LearnerError when it is too short or of a smaller vocabulary than
    the policy's, naming the key that the path is from.
    """
    path = config.algorithm.critic.path
    key = "model.path" if path is None else "algorithm.critic.path"
    settings = config.model.model_copy(update={"path": path or config.model.path})
    causal = load_hf(settings, key)
    check_positions(causal, settings, key)
    critic = CriticModel(causal)
    if path is not None:
        _check_vocabulary(critic, config)
    return shard_critic(critic, device, mesh)


def shard_critic(critic: CriticModel, device: torch.device, mesh: DeviceMesh | None) -> CriticModel:
    """As `shard` does. The head is a group of its own: in the root's its weights would be rounded to bf16 on a GPU."""
    if mesh is not None:
        fully_shard(critic.head, mesh=mesh)
    return shard(critic, device, mesh)


def _check_vocabulary(critic: CriticModel, config: Config) -> None:
    policy = transformers.AutoConfig.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    wanted = policy.get_text_config().vocab_size
    if critic.vocab_size < wanted:
        raise LearnerError(
            f"algorithm.critic.path is {config.algorithm.critic.path}, which knows {critic.vocab_size} tokens, but the policy "
            f"at model.path has {wanted}: give a critic with the policy's tokenizer"
        )
