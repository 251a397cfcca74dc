"""How much memory a run will take, per device, and the sentence when that is more than there is.

Pure: the model's size and what the machine has are arguments. Imports config and launcher.plan only. Invariant: an estimate
is of the largest parts alone, each with what it is and the key that lowers it; activations beyond the logits are left out,
so a run that is refused cannot fit, and one that is not refused might still not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from async_rl.config import Config
from async_rl.launcher.plan import Plan

GIB = 1 << 30
HOST = "the host"
NUM_LISTED = 4  # parts named in a line
# What a process takes before any weight: on the host, Python and its libraries; on a GPU, the CUDA context and, for an
# engine, graphs and workspaces.
LEARNER_BYTES, ENGINE_BYTES, TOY_BYTES = GIB // 2, GIB, GIB // 2
LEARNER_GPU_BYTES, ENGINE_GPU_BYTES = GIB // 2, 2 * GIB


@dataclass(frozen=True)
class ModelSize:
    """Elements, not bytes."""

    num_parameters: int
    largest_tensor: int
    vocab_size: int
    num_output: int = 0  # of the parameters, in output embeddings of their own, which a critic does without


@dataclass(frozen=True)
class Part:
    """A share of one device's memory; `fix` is what a user can do about it."""

    what: str
    num_bytes: int
    fix: str


Demand = Mapping[str, Sequence[Part]]  # by device: HOST, or "GPU 0"


def estimate(config: Config, plan: Plan, size: ModelSize, critic: ModelSize | None = None) -> Demand:
    """What the learner and the rollouts of the plan will take of every device they use.

    `critic` is the size of the model it starts from; without one there is no critic, or nobody knows its size.
    """
    demand: dict[str, list[Part]] = {HOST: []}
    for device, parts in [*_learner(config, plan, size, critic), *_rollouts(config, plan, size)]:
        demand.setdefault(device, []).extend(part for part in parts if part.num_bytes)
    return {device: _merged(parts) for device, parts in demand.items()}


def problem(demand: Demand, limits: Mapping[str, int]) -> str:
    """ "" when every device whose limit is known holds what it must, else one sentence about the first that does not."""
    for device, parts in demand.items():
        total = sum(part.num_bytes for part in parts)
        if device in limits and total > limits[device]:
            largest = parts[0]
            return (
                f"this run takes about {show(total)} of {device}, which has {show(limits[device])}; {show(largest.num_bytes)} "
                f"of it is {largest.what}: {largest.fix}"
            )
    return ""


def lines(demand: Demand, limits: Mapping[str, int]) -> list[str]:
    """One line per device, for a person."""
    found = []
    for device, parts in demand.items():
        has = f" of {show(limits[device])}" if device in limits else ""
        listed = ", ".join(f"{part.what} {show(part.num_bytes)}" for part in parts[:NUM_LISTED])
        found.append(f"{device}: about {show(sum(part.num_bytes for part in parts))}{has} ({listed})")
    return found


def show(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.0f} MiB"


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Equal parts added up, the largest first."""
    sums: dict[tuple[str, str], int] = {}
    for part in parts:
        sums[part.what, part.fix] = sums.get((part.what, part.fix), 0) + part.num_bytes
    merged = [Part(what, num_bytes, fix) for (what, fix), num_bytes in sums.items()]
    return sorted(merged, key=lambda part: -part.num_bytes)


class _Held(NamedTuple):
    """A model that every rank loads whole, in fp32, before it keeps its shard; bytes of one rank."""

    part: Part  # its shard with all that training adds, or alone when it is frozen
    whole: int
    resting: int  # of the part, what is there once it is loaded: all but gradients, which come with the first step


def _models(config: Config, plan: Plan, size: ModelSize, critic: ModelSize | None) -> list[_Held]:
    """Those of the learner, in the order in which they are loaded."""
    c, a, num_shards = config.learner, config.algorithm, config.learner.ranks // config.learner.replicas

    def fix(key: str) -> str:
        if c.replicas > 1:
            return "lower learner.replicas"
        return f"raise learner.ranks, or use a smaller {key}" if plan.learner.gpus else f"use a smaller {key}"

    def trained(what: str, count: int, key: str) -> _Held:
        part = Part(f"the {what}'s parameters, gradients and moments", 16 * count // num_shards, fix(key))
        return _Held(part, 4 * count, 12 * count // num_shards)

    models = [trained("learner", size.num_parameters, "model.path")]
    if critic is not None and a.has_critic:
        key = "algorithm.critic.path" if a.critic.path else "model.path"
        models.append(trained("critic", critic.num_parameters - critic.num_output, key))
    if a.has_reference:
        frozen = (2 if plan.learner.gpus else 4) * size.num_parameters // num_shards
        part = Part("the reference policy", frozen, "set algorithm.kl.beta=0 and algorithm.kl.gate=null")
        models.append(_Held(part, 4 * size.num_parameters, frozen))
    return models


def _loading(models: Sequence[_Held], num_shards: int) -> int:
    """Bytes by which loading one model after another, beside those that are there, exceeds what all take in the end."""
    held, peak = 0, 0
    for model in models:
        peak = max(peak, held + model.whole + model.whole // num_shards)
        held += model.resting
    return max(0, peak - sum(model.part.num_bytes for model in models))


def _learner(config: Config, plan: Plan, size: ModelSize, critic: ModelSize | None) -> list[tuple[str, list[Part]]]:
    """(device, parts) for each rank."""
    c = config.learner
    models = _models(config, plan, size, critic)
    states = [model.part for model in models]
    at_once = min(c.logprob_chunk_tokens, c.microbatch_tokens)
    logits = Part("the learner's logits", 3 * 4 * at_once * size.vocab_size, "lower learner.logprob_chunk_tokens")
    on_their_way = 2 * config.weights.bucket_bytes + 4 * size.largest_tensor
    transit = Part("weights on their way", on_their_way, "lower weights.bucket_bytes")
    fewer = "lower learner.ranks" if c.ranks > 1 else "use a smaller model.path"
    runtime = Part("the learner's runtime", LEARNER_BYTES, fewer)
    # parameters and moments of what is trained, without gradients
    copied = sum(model.resting for model in models if model.part.num_bytes > model.resting)
    smaller = "lower learner.replicas" if c.replicas > 1 else "use a smaller model.path"
    snapshot = Part("the copy that a checkpoint is written from", copied, smaller)
    found: list[tuple[str, list[Part]]] = []
    for rank in range(c.ranks):
        if plan.learner.gpus:
            own = [*states, logits, transit, Part("the learner's runtime", LEARNER_GPU_BYTES, fewer)]
            found.append((f"GPU {plan.learner.gpus[rank % len(plan.learner.gpus)]}", own))
            largest = max(model.whole for model in models)  # one after another, each gone when it is sharded
            # while ranks load there is no copy yet
            found.append((HOST, [runtime, snapshot, Part("whole models while ranks load", max(0, largest - copied), fewer)]))
        else:
            extra = max(0, _loading(models, c.ranks // c.replicas) - copied)
            loading = Part("whole models while ranks load", extra, fewer)
            found.append((HOST, [runtime, *states, snapshot, logits, transit, loading]))
    return found


def _rollouts(config: Config, plan: Plan, size: ModelSize) -> list[tuple[str, list[Part]]]:
    """(device, parts) for each rollout: weights twice, for the new ones are staged beside those that are served."""
    c = config.rollout
    fewer = "lower rollout.count" if c.count > 1 else "use a smaller model.path"
    found: list[tuple[str, list[Part]]] = []
    for rollout in plan.rollouts:
        if c.engine == "toy":
            weights = Part("the rollouts' weights", 2 * 4 * size.num_parameters, fewer)
            found.append((HOST, [weights, Part("the rollouts' runtime", TOY_BYTES, fewer)]))
            continue
        held = (2 if rollout.gpus else 4) * size.num_parameters
        device = f"GPU {rollout.gpus[0]}" if rollout.gpus else HOST
        staged_at = device if plan.own_gpus or config.weights.backend == "nccl" else HOST
        found.append((device, [Part("the rollouts' weights", held, fewer)]))
        found.append((staged_at, [Part("the rollouts' staged weights", held, fewer)]))
        found.append((device, [Part("the rollouts' KV cache", c.kv_cache_bytes, "lower rollout.kv_cache_bytes")]))
        found.append((HOST, [Part("the rollouts' runtime", ENGINE_BYTES, fewer)]))
        if rollout.gpus:
            found.append((device, [Part("the rollouts' runtime", ENGINE_GPU_BYTES, fewer)]))
    return found
