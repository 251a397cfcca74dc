"""What the worker needs of an inference engine, whichever it is (vLLM, or the scripted toy).

Invariant: token ids, log-probs and the (incarnation, version) of every token are exact, also across an update that
lands inside an answer. Every call is bounded by the deadline it is given.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import numpy as np

from async_rl.types import Completion, Sampling, WeightName
from async_rl.weights.group import GroupSpec
from async_rl.weights.manifest import Manifest

InFlight = Literal["keep", "recompute", "abort"]


class Engine(Protocol):
    generated_tokens: int  # since start, over all requests
    core_pid: int | None  # of the process that computes, when it is one of its own

    @property
    def serving(self) -> str:
        """The name of the weights in service; "" before the first."""
        ...

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        """One answer; prompt_ids int32 [P]. finish_reason "abort" after `abort`. A prompt the engine refuses gives
        "error" and no tokens. Cancelling the call ends the request. Raises EngineDead when the engine core is gone."""
        ...

    def together(self, num_requests: int) -> AbstractAsyncContextManager[None]:
        """Requests that begin inside the block are taken up as one batch by an engine that is idle: what floats round to
        depends on what is computed together, so a synchronous run repeats itself only if that does. Raises EngineDead."""
        ...

    async def abort(self, request_ids: list[str]) -> None:
        """End these requests; their `generate` returns what they have, with finish_reason "abort"."""
        ...

    async def prepare(self, spec: GroupSpec, manifest: Manifest, timeout_s: float) -> None:
        """Join the broadcast group if `spec` differs from the joined one, check the manifest against the parameters
        this engine holds, post the receive into staging buffers, while generation goes on. Raises WeightsError."""
        ...

    async def staged(self, timeout_s: float) -> list[str]:
        """Wait until every bucket has arrived; their digests in order. Raises WeightsError."""
        ...

    async def commit(self, name: WeightName, in_flight: InFlight, timeout_s: float) -> str:
        """Pause, load the staged weights, label, resume; returns the checksum of what the engine now holds.
        Raises WeightsError; the engine then serves nothing until a later commit succeeds."""
        ...

    async def discard(self) -> None:
        """Drop staging buffers and leave the group; the weights in service stay."""
        ...

    async def ping(self, timeout_s: float) -> None:
        """A round trip through the engine core; raises EngineDead when it does not answer in time."""
        ...

    async def close(self) -> None: ...


class EngineDead(Exception):
    """The engine core died or stopped answering; one sentence."""
