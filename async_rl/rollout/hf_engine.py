"""transformers as an engine, for evaluation: greedy answers, one at a time, from the weights in the model's folder.

Imports torch and transformers, and vllm_setup for the end tokens, never vllm. Invariant: an answer ends where vLLM's would:
at the same end tokens, which it holds, at the same stop strings, or at its length.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import torch
import transformers

from async_rl.config import Config
from async_rl.envs.base import Decode
from async_rl.envs.text import decoder, load_tokenizer
from async_rl.rollout.vllm_setup import end_token_ids
from async_rl.types import Completion, FinishReason, Sampling, WeightName
from async_rl.weights.pretrained import load_whole


class TransformersEngine:
    """Computes in a thread, so that the event loop and its deadlines go on."""

    def __init__(self, model: transformers.PreTrainedModel, decode: Decode, end_ids: list[int], name: WeightName) -> None:
        self._model, self._decode, self._end_ids, self._name = model.eval(), decode, set(end_ids), name
        self._alone = asyncio.Lock()

    @classmethod
    def create(cls, config: Config, name: WeightName) -> TransformersEngine:
        """Load `model.path`: bfloat16 on a GPU, float32 on a CPU, as vLLM would. Raises ConfigError."""
        on_gpu = torch.cuda.is_available()
        model = load_whole(config.model, dtype=torch.bfloat16 if on_gpu else torch.float32)
        decode = decoder(load_tokenizer(config.model))
        place: Any = torch.device("cuda" if on_gpu else "cpu")  # the annotation of `to` takes a model only
        return cls(
            model.to(place), decode, end_token_ids(model.config, config.model.path, config.model.trust_remote_code), name
        )

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        """See Engine.generate; the temperature is taken to be 0."""
        stopped = threading.Event()
        async with self._alone:
            try:
                return await asyncio.to_thread(self._answer, prompt_ids, sampling, stopped)
            finally:
                stopped.set()

    async def ping(self, timeout_s: float) -> None:
        """See Engine.ping: it computes in this very process."""

    async def close(self) -> None:
        del self._model

    @torch.inference_mode()
    def _answer(self, prompt_ids: np.ndarray, sampling: Sampling, stopped: threading.Event) -> Completion:
        ids, logprobs = [], []
        finish: FinishReason = "length"
        cache, next_1L = None, torch.from_numpy(prompt_ids).long().unsqueeze(0).to(self._model.device)
        while len(ids) < sampling.max_new_tokens and not stopped.is_set():
            out = self._model(input_ids=next_1L, past_key_values=cache, use_cache=True)
            logp_V = out.logits[0, -1].float().log_softmax(-1)
            cache, next_1L = out.past_key_values, logp_V.argmax().reshape(1, 1)
            ids.append(int(next_1L))
            logprobs.append(float(logp_V[ids[-1]]))
            if ids[-1] in self._end_ids or self._stops(ids, sampling.stop):
                finish = "stop"
                break
        return Completion(
            prompt_ids=prompt_ids,
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            incarnations=np.full(len(ids), self._name.incarnation, dtype=np.int32),
            versions=np.full(len(ids), self._name.version, dtype=np.int32),
            finish_reason=finish,
        )

    def _stops(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        if not stop:
            return False
        text = self._decode(np.array(ids, dtype=np.int32))
        return any(s in text for s in stop)
