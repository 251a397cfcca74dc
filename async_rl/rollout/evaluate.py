"""`async-rl eval`: the held-out accuracy of any model, counted as a run would count it.

A process of its own, started by the command line with `rollout.threads` in its environment. Imports what a rollout does.
Invariants: prompts, draws, sampling and reward are those of a run of the same configuration, so figures compare exactly; the
whole is bounded by `eval.timeout_s`, and what has not come by then is counted as missing; a signal leaves nothing behind.
"""

from __future__ import annotations

import sys

from async_rl.rollout.stopped import Stopped, leave_at_once, raise_stopped, until_stopped

if __name__ == "__main__":
    leave_at_once()  # the imports below take seconds, in which a person may well press Ctrl-C

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from async_rl.config import Config, ConfigError, load_config
from async_rl.data.evaluation import Evaluation
from async_rl.envs.base import Decode, Score, TaskError
from async_rl.envs.rewards import RewardError, RewardPool, check_loadable
from async_rl.envs.single_turn import SingleTurn
from async_rl.envs.tasks import build_prompts, examples
from async_rl.envs.text import decoder, load_tokenizer
from async_rl.observability.log import setup_logging
from async_rl.rollout.engine import EngineDead
from async_rl.rollout.hf_engine import TransformersEngine
from async_rl.rollout.scheduler import screened
from async_rl.rollout.vllm_engine import VllmEngine
from async_rl.types import Completion, Prompt, Sampling, WeightName
from async_rl.weights.base import WeightsError

NAME = WeightName(0, 0)  # of weights that no learner made
SAY_EVERY_S = 10.0
PING_S = 10.0  # an engine that is only busy answers between two steps


class Greedy(Protocol):
    """What an evaluation needs of an engine."""

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion: ...

    async def ping(self, timeout_s: float) -> None: ...


class Evaluator:
    """Answers every draw once, at most `concurrency` at a time."""

    def __init__(self, config: Config, heldout: Sequence[Prompt], engine: Greedy, score: Score, decode: Decode) -> None:
        self.config, self.engine, self.score, self.decode = config, engine, score, decode
        self.evaluation = Evaluation(heldout, config.eval.draws, config.seed, NAME, math.inf)
        self.last_error = ""
        self._said_s = time.monotonic()

    async def run(self, concurrency: int) -> None:
        """Returns when all is answered or `eval.timeout_s` is over; raises EngineDead."""
        try:
            async with asyncio.timeout(self.config.eval.timeout_s):
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(min(concurrency, self.config.eval.draws)):
                        tasks.create_task(self._work())
        except TimeoutError:
            self.last_error = f"not answered within eval.timeout_s={self.config.eval.timeout_s:g}, {await self._why_late()}"
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # EngineDead, the one thing an answer lets through

    async def _why_late(self) -> str:
        try:
            await self.engine.ping(PING_S)
        except EngineDead as e:
            return f"and {e}: look at what holds it, or evaluate again"
        return "though the engine is alive: raise eval.timeout_s, or lower eval.draws"

    async def _work(self) -> None:
        while (item := self.evaluation.next_lease()) is not None:
            self.evaluation.deliver(item[0], True, await self._reward(*item))
            if time.monotonic() - self._said_s > SAY_EVERY_S:
                self._said_s, draws = time.monotonic(), self.config.eval.draws
                print(f"eval: {draws - self.evaluation.missing} of {draws} answered", flush=True)

    async def _reward(self, eval_id: int, prompt: Prompt) -> float:
        rollout = self.config.rollout
        room = self.config.model.max_model_len - len(prompt.token_ids)
        sampling = Sampling(min(rollout.max_new_tokens, room), 0.0, tuple(rollout.stop))

        async def generate(prompt_ids: np.ndarray, sampling: Sampling) -> Completion:
            return await self.engine.generate(prompt_ids, sampling, str(eval_id))

        try:
            trajectory = screened(await SingleTurn().run(prompt, sampling, generate, self.score, self.decode))
        except EngineDead:
            raise
        except Exception as e:  # an environment's bug costs one answer, as it does in a run
            self.last_error = f"{type(e).__name__}: {e}"
            return math.nan
        self.last_error = trajectory.error or self.last_error
        return trajectory.reward


def main(engine: str, config_path: str, overrides: list[str]) -> int:
    """Evaluate the model at `model.path` and print the result; returns the exit code."""
    raise_stopped()
    try:
        config = load_config(config_path, overrides)
        setup_logging("eval", None, "warning")
        torch.set_num_threads(config.rollout.threads)
        started = time.monotonic()
        check_loadable(config.data.reward, examples(config.data))
        tokenizer = load_tokenizer(config.model)
        heldout = build_prompts(config, tokenizer).heldout
        evaluator = asyncio.run(until_stopped(_evaluate(config, heldout, decoder(tokenizer), _engine(config, engine))))
    except (ConfigError, TaskError, RewardError) as e:
        return _fail(2, str(e))
    except (EngineDead, WeightsError) as e:
        return _fail(1, str(e))
    except Stopped as stopped:
        return _fail(stopped.code, stopped.sentence)
    evaluation, draws = evaluator.evaluation, config.eval.draws
    if evaluation.num_delivered == 0:
        return _fail(4, f"none of {draws} answers counts, last error: {evaluator.last_error}")
    code = 4 if evaluation.missing else 0  # a figure of the answers that came in time is of the short ones
    if evaluation.num_delivered < draws:
        _fail(code, f"{draws - evaluation.num_delivered} of {draws} answers do not count, last error: {evaluator.last_error}")
    print(json.dumps(result(evaluation, config, engine, time.monotonic() - started)), flush=True)
    return code


def result(evaluation: Evaluation, config: Config, engine: str, seconds: float) -> dict[str, Any]:
    """What is printed last."""
    return {
        "accuracy": evaluation.accuracy,
        "num": evaluation.num_delivered,
        "unscored": evaluation.unscored,
        "missing": evaluation.missing,
        "draws": config.eval.draws,
        "engine": engine,
        "model": config.model.path,
        "seconds": round(seconds, 1),
    }


async def _evaluate(
    config: Config, heldout: Sequence[Prompt], decode: Decode, engine: VllmEngine | TransformersEngine
) -> Evaluator:
    pool, concurrency = None, 1
    try:
        if isinstance(engine, VllmEngine):
            concurrency = config.rollout.max_num_seqs
            await engine.serve_loaded(NAME, config.rollout.start_timeout_s)
        rollout = config.rollout  # in a thread: a Ctrl-C, which reaches the scorers too, must be seen here first
        pool = await asyncio.to_thread(RewardPool, config.data.reward, rollout.reward_workers, rollout.reward_timeout_s)
        evaluator = Evaluator(config, heldout, engine, pool.score, decode)
        await evaluator.run(concurrency)
        return evaluator
    finally:
        if pool is not None:
            pool.close()
        await engine.close()


def _engine(config: Config, kind: str) -> VllmEngine | TransformersEngine:
    """Comes before threads of ours, for it may fork."""
    if kind == "transformers":
        return TransformersEngine.create(config, NAME)
    return VllmEngine.create(config, timeout_s=config.rollout.start_timeout_s, log_level="ERROR")  # a person is reading


def _fail(code: int, sentence: str) -> int:
    print(f"async-rl: {sentence}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2], sys.argv[3:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; the interpreter's own end, with torch and vLLM loaded, has no bound
