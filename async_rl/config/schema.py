"""The keys: one frozen tree of sections, a docstring under each field.

Owns what a user may set, the range of each key, and the digest that learner and rollouts compare.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from async_rl.config.algorithm import AlgorithmConfig
from async_rl.config.section import LARGE, MANY, Few, Path, Seconds, Section

Decay = Annotated[float, Field(ge=0, lt=1)]
Answers = Annotated[int, Field(ge=1, le=1 << 20)]  # per prompt


class ModelConfig(Section):
    path: str  # preflight refuses an empty one, as any that is neither a folder nor a hub name
    """A Hugging Face folder, or a hub name."""
    make: Literal["tiny", "smollm2"] | None = None
    """Recipe by which `train` makes the model itself when `path` is absent."""
    max_model_len: int = Field(default=2048, ge=8, le=MANY)
    """Longest prompt + answer, in tokens, for engine and learner."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off: such a model is refused."""


class DataConfig(Section):
    dataset: str = "basic_arithmetic"
    """A reasoning-gym dataset by name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that dataset, passed through."""
    path: Path | None = None
    """Your own data instead of a dataset: a JSONL file with one object per line, `prompt` as text or as a list of chat
    messages, and any further fields, which the reward gets."""
    heldout_path: Path | None = None
    """A second such file for evaluation, instead of a share of the first, which loses the prompts that are in both."""
    num_items: int = Field(default=10_000, ge=1, le=MANY)
    """Items drawn from the generator; questions that repeat are kept once."""
    prompt: str | None = None
    """Format string over an item's fields. A dataset has `{question}` (the default), as given, and `{expression}`, without
    words and spaces; a file has the fields of its lines (default `{prompt}`)."""
    chat: bool = False
    """Wrap the prompt as a user message in the tokenizer's chat template."""
    system: str | None = None
    """System message before the prompt; needs chat."""
    reward: str = "async_rl.envs.rewards:exact_last_field"
    """`package.module:function`, called as `reward(prompt, answer, **fields)`; returns a number, or a dict with `score` and
    at most 16 further numbers to be logged. May be async. A module of your own is found in the working directory."""
    heldout_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Share of the prompts kept for evaluation, chosen by a hash of the question."""


class RolloutConfig(Section):
    count: int = Field(default=1, ge=0, le=4096)
    """Rollout processes that `train` starts on this host, 0 for none; more may join with `async-rl rollout`."""
    engine: Literal["vllm", "toy"] = "vllm"
    """The inference engine; `toy` is scripted, for tests and simulations."""
    max_new_tokens: int = Field(default=256, ge=1, le=MANY)
    """Longest answer, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the learner divides its logits by the same."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end an answer, beside the model's own end tokens."""
    num_slots: Few = 8
    """Groups in flight per rollout."""
    max_num_seqs: Few = 64
    """Answers the engine decodes at once."""
    kv_cache_bytes: int = Field(default=64 << 20, ge=1 << 20, le=LARGE)
    """KV cache of the engine, in bytes. Always explicit: vLLM's own default takes nearly all memory on a CPU."""
    threads: Few = 1
    """CPU threads of the engine."""
    reward_workers: Few = 1
    """Processes that run the reward function."""
    reward_timeout_s: Seconds = 10.0
    """An answer not scored within this time counts as unscorable and its scorer is replaced."""
    reward_memory_bytes: int = Field(default=8 << 30, ge=128 << 20, le=LARGE)
    """Memory of its own that one of these processes may take, its programs each as much; an answer that needs more counts as
    unscorable."""
    lease_timeout_s: Seconds = 300.0
    """A group not delivered within this time is leased again."""
    max_attempts: Few = 3
    """Leases of one group before it is dropped as failed."""
    start_timeout_s: Seconds = 300.0
    """Longest wait for the first rollout to be ready."""
    timeout_s: Seconds = 120.0
    """With no rollout left, the learner waits this long for one to join, then exits."""


class LearnerConfig(Section):
    ranks: Few = 1
    """Learner processes under torchrun on this host."""
    replicas: Few = 1
    """Copies of the policy that the ranks hold between them, each sharded over ranks / replicas (HSDP when more than 1)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the learner computes."""
    threads: Few = 1
    """CPU threads of each rank."""
    microbatch_tokens: int = Field(default=8192, ge=1, le=MANY)
    """Most tokens, padding included, in one forward pass of one rank."""
    logprob_chunk_tokens: int = Field(default=1024, ge=1, le=MANY)
    """Tokens whose vocabulary-wide logits exist at once."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    warmup_fraction: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps with linear warm-up."""
    hold_fraction: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps at the end held at the minimum."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Minimum learning rate over the peak, reached by a cosine."""
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.99), strict=False)
    """AdamW's moment decays."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm is clipped to this."""
    lr_by_ess: bool = False
    """Multiply the rate by the square root of the share of answers that the importance weights leave effective (VCPO)."""
    max_skipped_steps: int = Field(default=5, ge=1, le=MANY)
    """Steps in a row that change nothing (non-finite, or no trainable token) before the run stops."""
    step_timeout_s: Seconds = 1800.0
    """Longest any collective of the learner group may take."""


class TransportConfig(Section):
    host: str = "127.0.0.1"
    """Address the learner binds for control, data and weights."""
    port: int = Field(default=0, ge=0, le=65535)
    """Control port; data takes the next one. 0 lets the system choose, found through the discovery file."""
    keys: Path | None = None
    """Key folder that `async-rl keys` makes: control and data are encrypted, and nobody without a known key gets in."""
    insecure: bool = False
    """Allow a host beyond loopback without keys."""
    heartbeat_s: Seconds = 1.0
    """Interval of heartbeats, both ways."""
    heartbeat_timeout_s: Seconds = 15.0
    """Silence after which a rollout is expelled."""
    connect_timeout_s: Seconds = 120.0
    """A rollout that hears nothing from a learner for this long exits."""
    max_message_bytes: int = Field(default=64 << 20, ge=1 << 16, le=LARGE)
    """Largest group on the wire; a larger one is refused and counted."""
    max_buffered_bytes: int = Field(default=1 << 30, ge=1 << 20, le=LARGE)
    """Budget of groups granted and not yet trained; bounds the learner's memory."""


class WeightsConfig(Section):
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Broadcast backend; auto is NCCL when learner and engines have GPUs of their own, else gloo."""
    bucket_bytes: int = Field(default=32 << 20, ge=1 << 12, le=1 << 34)
    """Bytes per broadcast."""
    in_flight: Literal["keep", "recompute", "abort"] = "keep"
    """Running answers at an update: go on with the old KV cache, rebuild it, or resubmit as a prefix."""
    phase_timeout_s: Seconds = 60.0
    """Longest any phase of an update may take before the silent rollout is expelled."""


class CheckpointConfig(Section):
    every: int = Field(default=20, ge=0, le=MANY)
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = Field(default=2, ge=1, le=MANY)
    """Complete checkpoints kept."""
    keep_best: bool = False
    """Save at every evaluation, too, and keep the checkpoint with the best held-out score beside the newest."""
    resume: bool = True
    """Continue from the newest complete checkpoint in `run_dir`, if there is one; false begins anew, old rows moved aside."""
    max_failed_saves: int = Field(default=3, ge=1, le=MANY)
    """Saves in a row that may fail (disk full) before the run stops; the same for rows of metrics."""


class EvalConfig(Section):
    every: int = Field(default=20, ge=0, le=MANY)
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
    draws: int = Field(default=512, ge=0, lt=1 << 20)  # of an evaluation's group ids, 20 bits are the draw
    """Held-out prompts per evaluation, drawn with replacement, answered greedily; 0 turns evaluation off."""
    timeout_s: Seconds = 300.0
    """Longest an evaluation may take; what is missing then is counted, not guessed."""
    target: float | None = None
    """End the run when an evaluation reaches this score."""


class ObserveConfig(Section):
    tensorboard: bool = False
    """Write TensorBoard events beside `metrics.jsonl`."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port on loopback where Prometheus finds the numbers of the newest rows and the ledger's, over HTTP. 0: any, and told."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Verbosity of the process logs."""


class Config(Section):
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of data order, sampling and model recipes."""
    run_dir: Path | None = None
    """Where logs, metrics, checkpoints and the report go; by default a new folder `runs/<config>/<time>`."""
    num_steps: int = Field(ge=1, le=MANY)
    """Learner steps, each of which makes one policy version."""
    max_staleness: int = Field(default=2, ge=0, le=MANY)
    """Largest lag, in versions, between the policy that samples a token and the learner that trains on it."""
    on_stale: Literal["wait", "cancel", "train"] = "wait"
    """When old groups are late: wait for them, cancel and sample anew, or train on them beyond the bound."""
    groups_per_step: int = Field(ge=1, le=1 << 20)
    """Prompts per learner step."""
    group_size: Answers
    """Answers per prompt."""
    group_size_end: Answers | None = None
    """Move to this group size by doubling or halving, each size for as many steps, and prompts per step the other way, so that
    a step keeps its number of answers."""
    adaptive_group_sizes: tuple[Answers, Answers] | None = Field(default=None, strict=False)
    """Smallest and largest group, instead of `group_size` for all: prompts whose groups carried a signal less often get more of
    the same number of answers."""
    record: bool = False
    """Write every batch that a step takes to `run_dir/record`, so that `async-rl replay` can train on them again."""
    i_know: bool = False
    """Train on stale tokens without the correction that they need, as in an ablation."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    learner: LearnerConfig = LearnerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    transport: TransportConfig = TransportConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def max_group_bytes(self) -> int:
        """Upper bound of one group on the wire: five arrays of at most 4 bytes a token, the prompt, and a header, of which a
        sibling takes 512 bytes with its error and 1280 with 16 scores under names of 64 bytes."""
        tokens = self.largest_group * self.rollout.max_new_tokens
        return 4 * self.model.max_model_len + 17 * tokens + 4096 + (512 + 1280) * self.largest_group

    @property
    def largest_group(self) -> int:
        """Most answers that any lease asks for, a greedy one included."""
        largest = max(self.group_size, self.group_size_end or 0, *(self.adaptive_group_sizes or (0,)))
        return largest + self.algorithm.has_greedy

    @property
    def most_groups(self) -> int:
        """Most groups that any step takes: `groups_per_step`, or more while groups are smaller."""
        return self.groups_per_step * self.group_size // min(self.group_size, self.group_size_end or self.group_size)

    def digest(self) -> str:
        """What learner and rollouts must agree on: everything but where files are and how much is logged."""
        content = self.model_dump(mode="json", exclude={"run_dir": True, "observe": True, "transport": {"keys"}})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def config_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key a user may set, in order of declaration."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += config_keys(info.annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys
