"""What learner and rollouts say to each other on the control channel.

Owns the vocabulary of the wire and its version. Every message is a flat MessagePack map with a `kind`; it is validated
field by field on arrival. Groups travel on the data channel (codec.py), never here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, TypeAdapter

from async_rl.types import Split

PROTOCOL = 3
NAME = r"^[\w.-]{1,64}$"  # of a rollout

Count = Annotated[int, Field(ge=0, lt=2**63)]


def _printable(text: str) -> str:
    """What a peer says may end on a terminal: no escapes, no line breaks."""
    return "".join(c if c.isprintable() else " " for c in text)


Text = Annotated[str, Field(max_length=4096), AfterValidator(_printable)]
Pair = tuple[Count, Count]  # (incarnation, version) of weights, or (incarnation, n) of an attempt


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class Hello(Message):
    """rollout -> learner: who I am and what I was built from. Answered by Welcome or Error."""

    kind: Literal["hello"] = "hello"
    protocol: int
    run_id: Text
    config_digest: Text
    tokenizer_digest: Text
    name: Annotated[str, Field(pattern=NAME)]  # stable over reconnects, e.g. "rollout-0"
    num_slots: Annotated[int, Field(ge=1, le=4096)]
    num_workers: Annotated[int, Field(ge=1, le=4096)] = 1  # engine ranks that join the weight group
    pid: Count = 0


class Welcome(Message):
    """learner -> rollout: your id, which life of the learner this is, and the version it resumed at."""

    kind: Literal["welcome"] = "welcome"
    rollout_id: Text
    incarnation: Count
    version: Count
    data_address: Text


class Lease(Message):
    """learner -> rollout: permission to produce one group."""

    kind: Literal["lease"] = "lease"
    group_id: Count
    attempt: Pair
    split: Split
    born: Pair  # (incarnation, version) every live rollout had committed when the lease was granted
    prompt_id: Text
    prompt_ids: Annotated[list[Count], FailFast()]
    text: str
    fields: dict[str, Any]
    num_samples: Annotated[int, Field(ge=1, le=65536)]
    max_new_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0)]
    greedy: bool = False  # the last of the `num_samples` is at temperature 0, for the others to be compared with
    stop: Annotated[list[str], FailFast()] = []
    seed: Count
    timeout_s: float
    more: bool = False  # another one for you follows at once: begin them together


class Cancel(Message):
    """learner -> rollout: stop producing this attempt; nothing is owed for it."""

    kind: Literal["cancel"] = "cancel"
    group_id: Count
    attempt: Pair
    reason: Text


class Prepare(Message):
    """learner -> rollout: weights are coming. Join the group if it is new, agree on the manifest, post the receive."""

    kind: Literal["prepare"] = "prepare"
    incarnation: Count
    version: Count
    membership: Count
    backend: Literal["gloo", "nccl"]
    host: Text
    port: Annotated[int, Field(ge=0, le=65535)]
    tag: Text
    rank: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]
    manifest: dict[str, Any]
    timeout_s: float


class Prepared(Message):
    """rollout -> learner: manifest agreed, receive posted."""

    kind: Literal["prepared"] = "prepared"
    membership: Count
    version: Count


class Staged(Message):
    """rollout -> learner: every bucket has arrived in the staging buffers."""

    kind: Literal["staged"] = "staged"
    membership: Count
    version: Count


class Commit(Message):
    """learner -> rollout: check the digests, then pause, load, label, resume."""

    kind: Literal["commit"] = "commit"
    incarnation: Count
    version: Count
    membership: Count
    bucket_digests: Annotated[list[Text], FailFast()]


class Committed(Message):
    """rollout -> learner: the engine now serves this version; checksum of what it holds."""

    kind: Literal["committed"] = "committed"
    membership: Count
    version: Count
    checksum: Text


class Ack(Message):
    """learner -> rollout: the final word on one delivered group."""

    kind: Literal["ack"] = "ack"
    group_id: Count
    attempt: Pair
    outcome: Literal["accepted", "duplicate", "refused"]
    reason: Text = ""


class Heartbeat(Message):
    """Both ways. From a rollout: free slots and the engine's progress. From the learner: it lives."""

    kind: Literal["heartbeat"] = "heartbeat"
    free_slots: Count = 0
    num_running: Count = 0
    generated_tokens: Annotated[int, Field(ge=0, lt=2**48)] = 0
    engine_age_s: Annotated[float, Field(ge=0, le=1e9)] = 0.0  # since the engine core last answered
    phase: Text = ""


class Goodbye(Message):
    """rollout -> learner: I leave on purpose."""

    kind: Literal["goodbye"] = "goodbye"
    reason: Text


class End(Message):
    """learner -> rollout: the run is over; exit."""

    kind: Literal["end"] = "end"
    reason: Text


class Error(Message):
    """Either way. `rejoin`: discard leases and staging, say Hello again. `fatal`: exit with this text. `weights`: an update
    failed, in the membership named."""

    kind: Literal["error"] = "error"
    code: Literal["rejoin", "fatal", "weights", "refused"]
    text: Text
    membership: Count = 0


AnyMessage = Annotated[
    Hello
    | Welcome
    | Lease
    | Cancel
    | Prepare
    | Prepared
    | Staged
    | Commit
    | Committed
    | Ack
    | Heartbeat
    | Goodbye
    | End
    | Error,
    Field(discriminator="kind"),
]
MESSAGE: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)
