"""vLLM behind the Engine protocol: sampling with exact per-token versions, and updates that never stop it for long.

May import vllm (inside functions: the toy engine must not pay for it). Invariants: no request enters the core between the
pause and the resume of a commit, so its cache salt names the weights that will prefill it; nothing is generated before a
first good commit nor after a failed one.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from async_rl.config import Config
from async_rl.observability.log import get_logger
from async_rl.observability.waiting import waiting
from async_rl.rollout import vllm_setup
from async_rl.rollout.engine import EngineDead, InFlight
from async_rl.rollout.scratch import scratch_folder
from async_rl.rollout.stopped import leaving
from async_rl.types import Completion, FinishReason, Sampling, WeightName
from async_rl.weights.base import WeightsError
from async_rl.weights.group import GroupSpec
from async_rl.weights.manifest import Manifest
from async_rl.weights.pretrained import check_whole

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
POLL_S = (0.002, 0.05)  # first and longest pause between two looks at what has arrived
IDLE_CORE_S = 30.0
TOGETHER_S = 1.0  # longest that an idle engine waits for the next request of a batch
REAP_S = 5.0
log = get_logger(__name__)


@dataclass
class _Draft:
    """An answer in the making. It has several pieces only when an update aborted it and it was resubmitted."""

    prompt_ids: list[int]
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    names: list[WeightName] = field(default_factory=list)
    num_pieces: int = 0
    aborted: bool = False  # by our caller, not by an update
    running_as: str = ""  # vLLM's id of the piece being sampled

    def add(self, out: CompletionOutput) -> None:
        """Append one piece; raises ValueError when ids, log-probs and version spans do not match up."""
        ids, flat, spans = list(out.token_ids), out.logprobs, out.weight_versions or []
        names = [WeightName.parse(span.version) for span in spans for _ in range(span.start, span.end)]
        if len(names) != len(ids) or (ids and list(getattr(flat, "token_ids", ())) != ids):
            raise ValueError(f"vLLM returned {len(ids)} tokens, {len(names)} with a version, log-probs {flat!r:.200}")
        self.token_ids += ids
        self.logprobs += flat.logprobs if ids else []  # type: ignore[union-attr]
        self.names += names
        self.num_pieces += 1

    def truncate(self, num_tokens: int) -> None:
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:], self.names[num_tokens:]

    def completion(self, finish: FinishReason) -> Completion:
        names = np.array(self.names, dtype=np.int32).reshape(-1, 2)
        return Completion(
            prompt_ids=np.array(self.prompt_ids, dtype=np.int32),
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array([np.nan if x is None else x for x in self.logprobs], dtype=np.float32),
            incarnations=names[:, 0].copy(),
            versions=names[:, 1].copy(),
            finish_reason=finish,
        )


class VllmEngine:
    """One AsyncLLM. All methods belong to one event loop."""

    def __init__(self, engine: AsyncLLM, core: BaseProcess, private_dir: str) -> None:
        self.generated_tokens = 0
        self.stall_s = 0.0  # from pause to resume, at the last commit
        self._engine = engine
        self._core = core
        self.core_pid = core.pid
        self._private_dir = private_dir
        model = engine.model_config
        self._end_ids = vllm_setup.end_token_ids(model.hf_config, model.model, model.trust_remote_code)
        self._label = ""
        self._refusal = "the engine has no named weights yet: commit a version first"
        self._open = asyncio.Event()  # cleared while a commit is under way
        self._open.set()
        self._num_entering = 0  # requests on their way into the core
        self._num_begun = 0  # requests since start
        self._drafts: dict[str, _Draft] = {}

    @classmethod
    def create(cls, config: Config, *, timeout_s: float, log_level: str = "WARNING") -> VllmEngine:
        """Start vLLM; call it early, from the main thread. Raises ConfigError for a model that lacks tensors, which vLLM would
        not notice, and EngineDead when it does not come up in timeout_s. `log_level` is of vLLM's own lines."""
        check_whole(config.model)
        private_dir = scratch_folder("arl-")
        started = time.monotonic()
        try:
            with leaving(lambda: shutil.rmtree(private_dir, ignore_errors=True)), waiting("vLLM to start", normal=True):
                return cls(*vllm_setup.start(config, private_dir, timeout_s, log_level), private_dir)
        except Exception as e:
            shutil.rmtree(private_dir, ignore_errors=True)
            raise EngineDead(
                f"vLLM did not start with model.path={config.model.path}: {_one_line(e)} (its own log lines are above)"
            ) from e
        finally:
            log.info("starting vLLM took %.1f s", time.monotonic() - started)

    @property
    def serving(self) -> str:
        """See Engine.serving."""
        return self._label

    # ---- sampling

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        """See Engine.generate. Raises WeightsError while no good weights are in service."""
        draft = _Draft(prompt_ids.tolist(), sampling.max_new_tokens)
        self._num_begun += 1
        if problem := self._unfit(prompt_ids):
            log.warning("request %s refused: %s", request_id, problem)
            return draft.completion("error")
        self._drafts[request_id] = draft
        try:
            while True:
                finish = await self._piece(draft, sampling, f"{request_id}.{draft.num_pieces}")
                if finish != "abort" or draft.aborted:
                    break
            if sampling.stop and draft.num_pieces > 1 and self._cut_at_stop(draft, sampling.stop):
                finish = "stop"
            return draft.completion(finish)
        finally:
            del self._drafts[request_id]

    @asynccontextmanager
    async def together(self, num_requests: int) -> AsyncIterator[None]:
        """See Engine.together: the core is paused until all have entered, or none has for TOGETHER_S."""
        if self._drafts or num_requests < 2 or not self._open.is_set():
            yield
            return
        core, last = self._engine.engine_core, self._num_begun + num_requests
        self._num_entering += 1  # so that no commit begins meanwhile
        try:
            await self._idle_core(core.pause_scheduler_async(mode="keep", clear_cache=False))
            try:
                yield
                entered, since = (-1, -1), time.monotonic()
                while (self._num_begun < last or self._num_entering > 1) and time.monotonic() < since + TOGETHER_S:
                    if entered != (now := (self._num_begun, self._num_entering)):
                        entered, since = now, time.monotonic()
                    await asyncio.sleep(0.001)
            finally:  # also of a membership that is cancelled because this core is frozen: bounded, or it never ends
                await self._idle_core(core.resume_scheduler_async())
        finally:
            self._num_entering -= 1

    async def _idle_core(self, call: Awaitable[T]) -> T:
        """A core with nothing to do answers at once; raises EngineDead for one that does not."""
        try:
            with waiting("the idle engine core to take up a batch"):
                async with asyncio.timeout(IDLE_CORE_S):
                    return await self._alive(call)
        except TimeoutError:
            raise EngineDead(f"the idle engine core has not answered for {IDLE_CORE_S:g} s") from None

    async def abort(self, request_ids: list[str]) -> None:
        """See Engine.abort; unknown ids are ignored, they may have ended meanwhile."""
        drafts = [self._drafts[i] for i in request_ids if i in self._drafts]
        for draft in drafts:
            draft.aborted = True
        if running := [draft.running_as for draft in drafts if draft.running_as]:
            await self._alive(self._engine.abort(running, internal=True))

    def _unfit(self, prompt_ids: np.ndarray) -> str:
        """Why the core cannot take this prompt, or "". An id beyond the vocabulary would kill it."""
        vocab, longest = self._engine.model_config.get_vocab_size(), self._engine.model_config.max_model_len - 1
        if not 1 <= len(prompt_ids) <= longest:
            return f"the prompt has {len(prompt_ids)} tokens, but 1 to {longest} fit in model.max_model_len"
        if prompt_ids.min() < 0 or prompt_ids.max() >= vocab:
            return f"the prompt holds ids from {prompt_ids.min()} to {prompt_ids.max()}, but the vocabulary has {vocab}"
        return ""

    async def _piece(self, draft: _Draft, sampling: Sampling, piece_id: str) -> FinishReason:
        """Sample on from the draft until the core ends the request, for whatever reason."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input

        queue = None
        try:
            async with self._entry():
                if draft.aborted:
                    return "abort"
                prompt = tokens_input(draft.prompt_ids + draft.token_ids, cache_salt=self._label)
                params = self._params(sampling, draft)
                queue = await self._alive(self._engine.add_request(piece_id, prompt, params))
                draft.running_as = queue.request_id
            if draft.aborted:
                await self._engine.abort(queue.request_id, internal=True)
            out: Any = await self._alive(queue.get())
        except (VLLMClientError, ValueError) as e:
            log.warning("request %s refused by vLLM: %s", piece_id, _one_line(e))
            return "error"
        except asyncio.CancelledError:
            if queue is not None:
                await self._engine.abort(queue.request_id, internal=True)
            raise
        finally:
            draft.running_as = ""
        draft.add(out.outputs[0])
        self.generated_tokens += len(out.outputs[0].token_ids)
        return FINISH.get(out.outputs[0].finish_reason, "error")

    def _params(self, sampling: Sampling, draft: _Draft) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            max_tokens=draft.max_new_tokens - len(draft.token_ids),
            # A later piece must not replay the noise of the first.
            seed=None if sampling.seed is None else (sampling.seed + draft.num_pieces) % 2**63,
            stop=list(sampling.stop),
            stop_token_ids=self._end_ids,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _cut_at_stop(self, draft: _Draft, stop: tuple[str, ...]) -> bool:
        """vLLM looks for stop strings in the piece it samples; one that straddles two pieces is found here."""
        tokenizer = self._engine.get_tokenizer()

        def stopped(num_tokens: int) -> bool:
            text = tokenizer.decode(draft.token_ids[:num_tokens], skip_special_tokens=True)
            return any(s in text for s in stop)

        if not stopped(len(draft.token_ids)):
            return False
        draft.truncate(next(n for n in range(1, len(draft.token_ids) + 1) if stopped(n)))
        return True

    @asynccontextmanager
    async def _entry(self) -> AsyncIterator[None]:
        """Hold a request back while a commit is under way; let a commit wait for those already entering."""
        await self._open.wait()
        if self._refusal:
            raise WeightsError(self._refusal)
        self._num_entering += 1
        try:
            yield
        finally:
            self._num_entering -= 1

    # ---- weights

    async def prepare(self, spec: GroupSpec, manifest: Manifest, timeout_s: float) -> None:
        """See Engine.prepare. The group forms in the receiver's thread: that it did not shows in `staged`."""
        info = {"spec": asdict(spec), "manifest": manifest.to_dict()}
        call = self._engine.collective_rpc("async_rl_prepare", args=(info,))
        (problem,) = await self._weights("preparing", timeout_s, call)
        if problem:
            raise WeightsError(problem)

    async def staged(self, timeout_s: float) -> list[str]:
        """See Engine.staged."""
        deadline, pause_s = time.monotonic() + timeout_s, POLL_S[0]
        while True:
            digests = await self._arrived(max(1.0, deadline - time.monotonic()))
            if digests is not None:
                return digests
            if time.monotonic() > deadline:
                raise WeightsError(f"the weights have not arrived within {timeout_s:g} s: is the learner sending?")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S[1])

    async def commit(self, name: WeightName, in_flight: InFlight, timeout_s: float) -> str:
        """See Engine.commit. Weights that have not wholly arrived are refused before anything is paused."""
        if await self._arrived(timeout_s) is None:
            raise WeightsError(f"weights {name} cannot be committed: they have not wholly arrived")
        self._open.clear()
        self._refusal = f"the commit of {name} failed: the engine serves nothing until a later one succeeds"
        try:
            checksum = await self._weights(f"committing {name}", timeout_s, self._swap(name, in_flight))
            self._label, self._refusal = str(name), ""
        finally:
            self._open.set()
        return checksum

    async def serve_loaded(self, name: WeightName, timeout_s: float) -> None:
        """Serve the weights of `model.path` itself under this name: no learner sends any."""
        await self._weights(f"naming {name}", timeout_s, self._engine.update_weight_version(str(name)))
        self._label, self._refusal = str(name), ""

    async def discard(self) -> None:
        """See Engine.discard."""
        await self._alive(self._engine.shutdown_weight_transfer_engine())

    async def _swap(self, name: WeightName, in_flight: InFlight) -> str:
        engine, core = self._engine, self._engine.engine_core
        while self._num_entering:
            await asyncio.sleep(0)
        # Not engine.pause_generation: it adds 20 ms of sleep, for the caller's convenience only.
        mode = "abort" if in_flight == "abort" else "keep"
        await core.pause_scheduler_async(mode=mode, clear_cache=in_flight != "keep")
        start = time.monotonic()
        (checksum,) = await engine.collective_rpc("async_rl_load")
        await engine.update_weight_version(str(name))
        await core.resume_scheduler_async()
        self.stall_s = time.monotonic() - start
        return checksum

    async def _arrived(self, timeout_s: float) -> list[str] | None:
        (state,) = await self._weights("staging", timeout_s, self._engine.collective_rpc("async_rl_arrived"))
        if state["error"]:
            raise WeightsError(state["error"])
        return state["digests"]

    async def _weights(self, phase: str, timeout_s: float, call: Awaitable[T]) -> T:
        """Bound a call into the core and turn what it raises into one sentence."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._alive(call)
        except TimeoutError:
            raise WeightsError(f"{phase} weights: the engine core did not answer within {timeout_s:g} s") from None
        except (EngineDead, WeightsError):
            raise
        except Exception as e:
            raise WeightsError(f"{phase} weights: {_one_line(e).rpartition('method failed: ')[2]}") from None

    # ---- life

    async def ping(self, timeout_s: float) -> None:
        """See Engine.ping."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._alive(self._engine.engine_core.is_scheduler_paused_async())
        except TimeoutError:
            raise EngineDead(f"the engine core has not answered for {timeout_s:g} s") from None

    async def close(self) -> None:
        """Stop the core and remove its files."""
        self._engine.shutdown(timeout=0)
        del self._engine  # its destructor fails noisily when it runs as late as the interpreter's end
        self._core.join(REAP_S)
        shutil.rmtree(self._private_dir, ignore_errors=True)

    async def _alive(self, call: Awaitable[T]) -> T:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            return await call
        except (EngineDeadError, EngineGenerateError) as e:
            raise EngineDead(f"the engine core died: {_one_line(e)}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
