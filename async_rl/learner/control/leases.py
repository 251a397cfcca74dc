"""What a lease says: the message built from a group record or an evaluation item.

Pure. Invariant: a seed is never used for two attempts, nor for two lives of the learner.
"""

from __future__ import annotations

import hashlib

from async_rl.config import Config
from async_rl.data.record import Record
from async_rl.transport.messages import Lease
from async_rl.types import Prompt, Split, WeightName


def training_lease(config: Config, record: Record) -> Lease:
    """One group at the sampling temperature, with as many answers as its record says at every attempt."""
    born = WeightName(record.attempt.incarnation, record.born)
    return _lease(
        config,
        record.group_id,
        (record.attempt.incarnation, record.attempt.n),
        "train",
        record.prompt,
        born,
        num_samples=record.size,
        temperature=config.rollout.temperature,
        greedy=config.algorithm.has_greedy,
        timeout_s=config.rollout.lease_timeout_s,
    )


def evaluation_lease(config: Config, eval_id: int, prompt: Prompt, name: WeightName, timeout_s: float) -> Lease:
    """One greedy answer."""
    attempt = (name.incarnation, 0)
    return _lease(config, eval_id, attempt, "eval", prompt, name, num_samples=1, temperature=0.0, timeout_s=timeout_s)


def _lease(
    config: Config,
    group_id: int,
    attempt: tuple[int, int],
    split: Split,
    prompt: Prompt,
    born: WeightName,
    *,
    num_samples: int,
    temperature: float,
    timeout_s: float,
    greedy: bool = False,
) -> Lease:
    room = config.model.max_model_len - len(prompt.token_ids)
    return Lease(
        group_id=group_id,
        attempt=attempt,
        split=split,
        born=born,
        prompt_id=prompt.prompt_id,
        prompt_ids=[int(i) for i in prompt.token_ids],
        text=prompt.text,
        fields=prompt.fields,
        num_samples=num_samples,
        max_new_tokens=min(config.rollout.max_new_tokens, room),
        temperature=temperature,
        greedy=greedy,
        stop=list(config.rollout.stop),
        seed=_seed(config.seed, group_id, attempt),
        timeout_s=timeout_s,
    )


def _seed(seed: int, group_id: int, attempt: tuple[int, int]) -> int:
    """A stable 63-bit seed."""
    text = f"{seed}:{group_id}:{attempt[0]}:{attempt[1]}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
