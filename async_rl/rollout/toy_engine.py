"""An engine without a language model: scripted lengths, delays and faults, real weights, exact versions.

Owns tensors that it receives, loads and checksums like a real engine, over the real broadcast group; imports torch, never
vllm. Invariant: tokens are a pure function of (seed, prompt, position, weights served at that position), uniform over
`num_tokens` ids, so every log-prob is exactly -ln(num_tokens); a version changes only while generation is paused.
Stop strings are not looked for: it has no text.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from async_rl.config import Config
from async_rl.rollout.engine import EngineDead, InFlight
from async_rl.types import Completion, FinishReason, Sampling, WeightName
from async_rl.weights.base import WeightsError
from async_rl.weights.checksum import checksum
from async_rl.weights.group import GroupSpec
from async_rl.weights.manifest import Manifest
from async_rl.weights.receiver import Receiver

SCRIPT_VARIABLE = "ASYNC_RL_TOY"  # JSON of Script's fields, for processes that nobody can hand a Script
Phase = Literal["prepare", "staged", "commit", "ping"]
MIN_SLEEP_S = 0.001  # shorter token delays are slept several tokens at a time
POLL_S = 0.005
CHUNK_TOKENS = 16  # tokens between two yields to the loop when there is no delay


@dataclass(frozen=True)
class Script:
    """What the toy does. Requests are numbered from 0 in order of arrival."""

    token_delay_s: float = 0.0
    num_tokens: int = 8  # ids to draw from
    first_token: int = 0  # the smallest of them
    median_length: float = math.inf  # tokens; inf: every answer runs to its limit
    length_sigma: float = 0.0  # of the log-normal around the median: 1 gives a long tail
    fault: Literal["", "hang", "raise", "abort", "nan", "die"] = ""
    fault_requests: tuple[int, ...] | None = None  # None: every request
    frozen: tuple[Phase, ...] = ()  # calls that do not return ...
    frozen_s: float = math.inf  # ... for so long

    @classmethod
    def from_environment(cls) -> Script:
        """Raises ValueError (pydantic's) on a field or value that is none of Script's."""
        return TypeAdapter(cls).validate_json(os.environ.get(SCRIPT_VARIABLE, "{}"))


@dataclass
class _Request:
    number: int
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ToyEngine:
    """Implements rollout.engine.Engine. `script` may be replaced at any time."""

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        script: Script,
        max_model_len: int,
        serving: WeightName | None = None,
    ) -> None:
        """Until its first commit it serves `serving`; with None it keeps requests waiting."""
        self.script = script
        self.generated_tokens = 0
        self.core_pid: int | None = None
        self.parameters = dict(parameters)
        self.name = serving or WeightName(0, 0)
        self._max_model_len = max_model_len
        self._serving = asyncio.Event()
        if serving is not None:
            self._serving.set()
        self._requests: dict[str, _Request] = {}
        self._num_requests = 0
        self._receiver: Receiver | None = None
        self._dead = False

    @classmethod
    def create(cls, config: Config) -> ToyEngine:
        """Holds the tensors of the Hugging Face folder `model.path`; its script comes from the environment."""
        parameters: dict[str, torch.Tensor] = {}
        for file in sorted(Path(config.model.path).glob("*.safetensors")):
            parameters.update(load_file(file))
        return cls(parameters, Script.from_environment(), config.model.max_model_len)

    @property
    def serving(self) -> str:
        return str(self.name) if self._serving.is_set() else ""

    # ---- generation

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        request = self._requests[request_id] = _Request(self._num_requests)
        self._num_requests += 1
        try:
            return await self._generate(np.asarray(prompt_ids, dtype=np.int32), sampling, request)
        finally:
            del self._requests[request_id]

    async def _generate(self, prompt_ids: np.ndarray, sampling: Sampling, request: _Request) -> Completion:
        script, fault = self.script, self._fault(request)
        room = self._max_model_len - len(prompt_ids)
        if fault == "die":
            self._dead = True
        if fault == "raise":
            raise RuntimeError(f"scripted fault in request {request.number}")
        if fault == "hang":
            await request.aborted.wait()
        base = _base(prompt_ids, sampling, request.number)
        wanted, limit = _length(script, base), min(sampling.max_new_tokens, room)
        length = max(0, min(wanted, limit)) // (2 if fault == "abort" else 1)
        tokens, versions = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int32)]
        chunk = CHUNK_TOKENS if not script.token_delay_s else max(1, round(MIN_SLEEP_S / script.token_delay_s))
        done = 0
        while done < length and not request.aborted.is_set():
            await asyncio.sleep(script.token_delay_s * min(chunk, length - done))
            await self._serving.wait()
            self._raise_if_dead()
            positions = np.arange(done, min(done + chunk, length), dtype=np.uint64)
            tokens.append(_draw(base, positions, self.name, script))
            versions.append(np.tile(np.asarray(self.name, np.int32), (len(positions), 1)))
            done += len(positions)
            self.generated_tokens += len(positions)
        self._raise_if_dead()
        finish: FinishReason = "stop" if wanted <= limit else "length"
        if request.aborted.is_set() or fault == "abort":
            finish = "abort"
        elif room <= 0:
            finish = "error"
        return _completion(prompt_ids, np.concatenate(tokens), np.concatenate(versions), finish, script, fault == "nan")

    def _fault(self, request: _Request) -> str:
        requests = self.script.fault_requests
        return self.script.fault if requests is None or request.number in requests else ""

    @asynccontextmanager
    async def together(self, num_requests: int) -> AsyncIterator[None]:
        """Each answer is a function of its own request alone."""
        yield

    async def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if request_id in self._requests:
                self._requests[request_id].aborted.set()

    # ---- weights

    async def prepare(self, spec: GroupSpec, manifest: Manifest, timeout_s: float) -> None:
        await self._maybe_freeze("prepare", timeout_s)
        held = {n: p for n, p in self.parameters.items() if n not in manifest.ties}
        dtypes = {t.name: t.dtype for t in manifest.tensors}  # the toy computes in no dtype of its own
        manifest.check_against({n: (dtypes.get(n, "float32"), tuple(p.shape)) for n, p in held.items()})
        if self._receiver is None or self._receiver.spec != spec:
            await self.discard()
            self._receiver = Receiver(spec, manifest)
        self._receiver.post()

    async def staged(self, timeout_s: float) -> list[str]:
        await self._maybe_freeze("staged", timeout_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        receiver = self._posted()
        while (digests := receiver.arrived()) is None:
            if asyncio.get_running_loop().time() > deadline:
                raise WeightsError(f"the toy engine's weights did not arrive within {timeout_s:g} s")
            await asyncio.sleep(POLL_S)
        return digests

    async def commit(self, name: WeightName, in_flight: InFlight, timeout_s: float) -> str:
        """All three ways of `in_flight` are the same here: there is no KV cache."""
        self._serving.clear()
        await self._maybe_freeze("commit", timeout_s)
        for tensor_name, tensor in self._posted().tensors():
            self.parameters[tensor_name] = tensor.clone()
            for alias, target in self._posted().manifest.ties.items():
                if target == tensor_name and alias in self.parameters:
                    self.parameters[alias] = self.parameters[tensor_name]
        self.name = name
        self._serving.set()
        return checksum((t.name, self.parameters[t.name]) for t in self._posted().manifest.tensors)

    async def discard(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    def _posted(self) -> Receiver:
        if self._receiver is None:
            raise WeightsError("the toy engine was asked for weights that nobody prepared")
        return self._receiver

    async def ping(self, timeout_s: float) -> None:
        self._raise_if_dead()
        try:
            await self._maybe_freeze("ping", timeout_s)
        except WeightsError as e:
            raise EngineDead(str(e)) from None

    async def close(self) -> None:
        await self.discard()

    async def _maybe_freeze(self, phase: Phase, timeout_s: float) -> None:
        """Polls the script, so that a test can thaw the engine."""
        deadline = asyncio.get_running_loop().time() + min(timeout_s, self.script.frozen_s)
        while phase in self.script.frozen and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        if phase in self.script.frozen and self.script.frozen_s > timeout_s:
            raise WeightsError(f"the toy engine did not answer {phase} within {timeout_s:g} s")

    def _raise_if_dead(self) -> None:
        if self._dead:
            raise EngineDead("the toy engine died as its script says")


def _completion(
    prompt_ids: np.ndarray, token_ids: np.ndarray, names: np.ndarray, finish: FinishReason, script: Script, nan: bool
) -> Completion:
    logprobs = np.full(len(token_ids), -math.log(script.num_tokens), np.float32)
    if nan:
        logprobs[len(logprobs) // 2] = np.nan
    return Completion(prompt_ids, token_ids, logprobs, names[:, 0].copy(), names[:, 1].copy(), finish)


def _base(prompt_ids: np.ndarray, sampling: Sampling, number: int) -> int:
    """64 bits that stand for everything an answer depends on but position and weights; greedy depends on the prompt alone."""
    seed = "greedy" if sampling.temperature == 0 else f"unseeded {number}" if sampling.seed is None else str(sampling.seed)
    digest = hashlib.blake2b(prompt_ids.tobytes() + seed.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _length(script: Script, base: int) -> float:
    if math.isinf(script.median_length):
        return math.inf
    z = np.random.default_rng(base).standard_normal()
    return max(1, round(script.median_length * math.exp(script.length_sigma * z)))


def _draw(base: int, positions_T: np.ndarray, name: WeightName, script: Script) -> np.ndarray:
    """int32 [T]: splitmix64 of (base, position, weights), uniform over the script's ids."""
    mixed = (base ^ (name.incarnation * 0x9E3779B97F4A7C15 + name.version * 0xD1B54A32D192ED03)) & (2**64 - 1)
    with np.errstate(over="ignore"):
        z = np.uint64(mixed) + (positions_T + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z % np.uint64(script.num_tokens)).astype(np.int32) + np.int32(script.first_token)
