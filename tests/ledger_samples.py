"""Rules, prompts and groups for the ledger's tests."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from async_rl.data.ledger import Ledger
from async_rl.data.record import Deal, Record, Rules
from async_rl.types import Attempt, Group, Prompt, Trajectory

GROUP_BYTES = 100


def make_rules(**changes: Any) -> Rules:
    groups = changes.pop("groups_per_step", 2)
    values: dict[str, Any] = {
        "max_staleness": 1,
        "on_stale": "wait",
        "num_steps": 10,
        "groups_per_step": groups if callable(groups) else lambda version: groups,
        "max_attempts": 3,
        "lease_timeout_s": 10.0,
        "max_buffered_bytes": 1 << 20,
        "max_group_bytes": GROUP_BYTES,
    }
    return Rules(**(values | changes))


def make_prompt(i: int) -> Prompt:
    return Prompt(f"p{i}", np.array([i, i + 1], np.int32), f"prompt {i}", {"answer": str(i)})


def counter(size: int = 2) -> Deal:
    """Prompts p0, p1, ... for ever, with `size` answers each."""
    numbers = iter(range(1 << 30))
    return lambda step: (make_prompt(next(numbers)), size)


def make_trajectory(versions: list[int], incarnations: list[int] | int = 1, mask: list[bool] | None = None) -> Trajectory:
    n = len(versions)
    return Trajectory(
        token_ids=np.arange(n, dtype=np.int32),
        logprobs=np.full(n, -1.0, np.float32),
        incarnations=np.broadcast_to(np.asarray(incarnations, np.int32), (n,)),
        versions=np.asarray(versions, np.int32),
        mask=np.ones(n, bool) if mask is None else np.asarray(mask),
        finish_reason="stop",
        reward=1.0,
    )


def make_group(record: Record, versions: list[int], incarnations: list[int] | int = 1, **changes: Any) -> Group:
    """A delivery for this record's attempt: all siblings with tokens of these versions."""
    values: dict[str, Any] = {
        "group_id": record.group_id,
        "attempt": record.attempt,
        "split": "train",
        "rollout_id": record.rollout_id or "r0",
        "prompt_ids": record.prompt.token_ids,
        "trajectories": (make_trajectory(versions, incarnations),) * record.size,
    }
    return Group(**(values | changes))


def packed(data: Any) -> bytes:
    """MessagePack, as a checkpoint would hold it."""
    result = msgpack.packb(data)
    assert isinstance(result, bytes)
    return result


def pack_group(group: Group) -> list[bytes]:
    """A stand-in for the transport's codec."""
    head = [group.group_id, list(group.attempt), group.split, group.rollout_id, np.asarray(group.prompt_ids).tolist()]
    body = [[t.versions.tolist(), t.incarnations.tolist(), t.mask.tolist()] for t in group.trajectories]
    return [packed(head), packed(body)]


def unpack_group(frames: list[bytes]) -> Group:
    group_id, attempt, split, rollout_id, prompt_ids = msgpack.unpackb(frames[0])
    body = msgpack.unpackb(frames[1])
    trajectories = tuple(make_trajectory(versions, incarnations, mask) for versions, incarnations, mask in body)
    return Group(group_id, Attempt(*attempt), split, rollout_id, np.array(prompt_ids, np.int32), trajectories)


def reload(ledger: Ledger, incarnation: int, **changes: Any) -> Ledger:
    """What the next life of the learner makes of this ledger's checkpoint, through MessagePack."""
    state = msgpack.unpackb(packed(ledger.state_dict(pack_group)))
    fresh = Ledger(changes.pop("rules", ledger.rules), incarnation, changes.pop("version", state["version"]))
    fresh.load_state_dict(state, unpack_group, **changes)
    return fresh
