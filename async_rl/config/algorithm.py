"""The section `algorithm`: how a batch of scored answers becomes an update."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from async_rl.config.methods import ADVANTAGES, CORRECTIONS, LOSSES, MASKS, NORMALIZERS, completed, validated
from async_rl.config.section import MANY, Path, Seconds, Section, refused

KINDS: dict[str, tuple[str, dict[str, type[Section]]]] = {  # field -> (its default, the options of each name)
    "advantage": ("grpo", ADVANTAGES),
    "loss": ("decoupled_ppo", LOSSES),
    "correction": ("token_truncate", CORRECTIONS),
    "normalizer": ("none", NORMALIZERS),
}


class CriticConfig(Section):
    """Of the methods that train a critic (gae, vtrace, hybrid); with others these keys count for nothing, so that one file
    serves both."""

    path: Path | None = None
    """Model that the critic starts from, under a new output of one number; default: `model.path`. These keys
    count only with a method that trains a critic."""
    lr: float = Field(default=1e-5, gt=0)
    """Its peak learning rate, under the policy's schedule."""
    clip: float | None = Field(default=0.5, gt=0)
    """Furthest, in units of the return, that a value may move per batch before its gradient is cut; null turns it off."""
    warmup_steps: int = Field(default=0, ge=0, le=MANY)
    """First steps that train the critic alone."""
    popart: float = Field(default=0.0, ge=0, lt=1)
    """Weight of a batch in the running moments by which its targets are standardised (PopArt); 0 leaves them as they are."""


class KLConfig(Section):
    beta: float = Field(default=0.0, ge=0)
    """Coefficient of the KL to the policy at `model.path`; above 0 the learner holds that model, too."""
    into: Literal["reward", "detached_k2", "attached_k3", "straight_through_k3"] = "detached_k2"
    """Where it goes: off the reward of each token, or into the loss, in a form whose gradient is right."""
    cap: float = Field(default=2.0, ge=1)
    """Upper bound of the importance ratio in the loss, where it is detached_k2 or straight_through_k3."""
    target: float | None = Field(default=None, gt=0)
    """Steer beta towards this KL, in nats per answer (arXiv:1909.08593)."""
    horizon: int = Field(default=10_000, ge=1, le=MANY)
    """Answers over which that steering acts."""
    gate: float | None = Field(default=None, gt=0)
    """Pause training when the KL, in nats per answer, stays above this."""
    gate_patience: int = Field(default=3, ge=1, le=MANY)
    """Steps in a row above it before the pause."""
    gate_resume_ratio: float = Field(default=0.5, gt=0, le=1)
    """The alarm ends when the KL is below this share of the gate."""
    gate_action: Literal["wait", "roll_back", "halve_lr", "double_beta"] = "wait"
    """What is done in the pause: wait for you, go back to the newest checkpoint from before the alarm, or change one thing."""
    gate_timeout_s: Seconds = 3600.0
    """Longest wait for you; then the run is saved and ends."""


class AlgorithmConfig(Section):
    preset: str | None = None
    """A named set of the keys below, `algorithm=ppo` for short; keys set beside it win (docs/algorithms.md). Options go with
    their method, and a mapping given whole, as in `algorithm.masks={}`, replaces what stood there."""
    advantage: Literal[
        "grpo",
        "dr_grpo",
        "grpo_batch_std",
        "rloo",
        "opo",
        "remax",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gae",
        "vtrace",
        "hybrid",
    ] = "grpo"
    """Advantage estimator; gae, vtrace and hybrid train a critic."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Its options (docs/algorithms.md)."""
    loss: Literal[
        "ppo",
        "bypass_ppo",
        "decoupled_ppo",
        "gspo",
        "cispo",
        "aipo",
        "topr",
        "sapo",
        "dppo_tv",
        "kimi_k15",
        "kimi_pmd",
    ] = "decoupled_ppo"
    """Policy loss."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Its options (docs/algorithms.md)."""
    correction: Literal[
        "none",
        "token_none",
        "token_truncate",
        "token_clip",
        "token_mask",
        "sequence_none",
        "sequence_truncate",
        "sequence_clip",
        "sequence_mask",
        "geometric_none",
        "geometric_truncate",
        "geometric_clip",
        "geometric_mask",
    ] = "token_truncate"
    """Importance-sampling weight from behavior to proximal policy: of what, and how it is bounded."""
    correction_options: dict[str, Any] = Field(default_factory=dict)
    """Its bounds (docs/algorithms.md)."""
    correction_normalize: bool = False
    """Divide the weights by their mean over the batch."""
    masks: dict[str, dict[str, Any]] = Field(default_factory=lambda: {"veto": {}}, validate_default=True)
    """Tokens and answers to leave out of the loss, but not of its count: `{name: options}` (docs/algorithms.md). Naming any
    replaces the default: name `veto`, too, to keep it."""
    aggregation: (
        Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "prompt_mean"] | None
    ) = None
    """How per-token losses become one number; default: that of the loss's paper, else token_mean."""
    num_minibatches: int = Field(default=1, ge=1, le=1000)
    """Optimizer steps per pass over a batch; more than one cost a forward pass for the proximal log-probs."""
    num_epochs: int = Field(default=1, ge=1, le=1000)
    """Passes over a batch."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Proximal log-probs by a forward pass, or, with several optimizer steps, interpolated by version (arXiv:2512.06547)."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    normalizer: Literal["none", "ema", "debiased_ema"] = "none"
    """Running normalisation of rewards."""
    normalizer_options: dict[str, Any] = Field(default_factory=dict)
    """Its options (docs/algorithms.md)."""
    overlong: Literal["keep", "mask"] = "keep"
    """Answers cut at `rollout.max_new_tokens`: train on them, or leave them out of the loss and its count."""
    overlong_buffer_tokens: int = Field(default=0, ge=0, le=MANY)
    """Take up to 1 off the reward over the last so many tokens before the limit; 0 takes nothing."""
    zero_variance: Literal["keep", "mask", "refill"] = "keep"
    """Groups whose rewards are all equal: train with advantage 0, leave out of the loss and its count, or replace."""
    max_refill: int = Field(default=4, ge=1, le=1000)
    """With `refill`: groups replaced per step, in units of `groups_per_step`. Always: as many unscorable ones in a row end
    the run."""
    shuffle_rewards: bool = False
    """Control experiment: permute the rewards within a batch, so that nothing can be learned from them."""
    critic: CriticConfig = CriticConfig()
    kl: KLConfig = KLConfig()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Fill in the options of the methods that are named."""
        if not isinstance(data, dict):
            return data
        options = {
            f"{kind}_options": completed(kind, str(data.get(kind, default)), data.get(f"{kind}_options", {}), table)
            for kind, (default, table) in KINDS.items()
        }
        return data | options

    @field_validator("masks")
    @classmethod
    def _masks(cls, masks: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name in masks:
            if name not in MASKS:
                raise refused(f"algorithm.masks names {name!r}: a mask is one of {', '.join(MASKS)}")
        return {name: validated(f"algorithm.masks.{name}", name, given, MASKS[name]) for name, given in masks.items()}

    @property
    def has_critic(self) -> bool:
        return self.advantage in ("gae", "vtrace") or (
            self.advantage == "hybrid" and min(self.advantage_options["grpo_end"], self.advantage_options["critic_start"]) < 1
        )

    @property
    def has_greedy(self) -> bool:
        """Whether the last answer of each group is a greedy one, for the others to be compared with."""
        return self.advantage == "remax"

    @property
    def has_reference(self) -> bool:
        return self.kl.beta > 0 or self.kl.gate is not None
