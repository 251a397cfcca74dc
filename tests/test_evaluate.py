"""Evaluation outside of a run: what counts, what bounds it, and that transformers ends an answer where vLLM would."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config import Config, ConfigError, parse_config
from async_rl.envs.base import Scored
from async_rl.envs.text import decoder, load_tokenizer
from async_rl.rollout.engine import EngineDead
from async_rl.rollout.evaluate import NAME, Evaluator
from async_rl.rollout.hf_engine import TransformersEngine
from async_rl.types import Completion, Prompt, Sampling

from .ledger_samples import make_prompt
from .runs import random_model

torch.set_num_threads(1)


def settings(path: str = "none", *, draws: int = 20, timeout_s: float = 60.0, **rollout: Any) -> Config:
    return parse_config(
        {
            "num_steps": 1,
            "groups_per_step": 1,
            "group_size": 2,
            "model": {"path": path, "max_model_len": 32},
            "rollout": {"max_new_tokens": 8, "stop": ["!"]} | rollout,
            "eval": {"draws": draws, "timeout_s": timeout_s},
        }
    )


class Scripted:
    """An engine that answers each prompt with its own first token, and counts who is there at once."""

    def __init__(
        self, error: Exception | None = None, wait_s: float = 0.001, finish: Any = "stop", logprob: float = 0.0
    ) -> None:
        self.error, self.wait_s, self.finish, self.logprob = error, wait_s, finish, logprob
        self.silent = False
        self.asked: list[Sampling] = []
        self.now = self.most = 0

    async def ping(self, timeout_s: float) -> None:
        if self.silent:
            raise EngineDead(f"the engine core has not answered for {timeout_s:g} s")

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        self.asked.append(sampling)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.wait_s)
            if self.error:
                raise self.error
        finally:
            self.now -= 1
        one = np.ones(1, dtype=np.int32)
        return Completion(prompt_ids, prompt_ids[:1], np.full(1, self.logprob, np.float32), 0 * one, 0 * one, self.finish)


async def score(prompt: Prompt, answer: str) -> Scored:
    return Scored(float(answer == "even"))


async def run(engine: Scripted, config: Config, concurrency: int = 4) -> Evaluator:
    prompts = [make_prompt(i) for i in range(8)]
    evaluator = Evaluator(config, prompts, engine, score, lambda ids: "odd" if int(ids[0]) % 2 else "even")
    await evaluator.run(concurrency)
    return evaluator


async def test_every_draw_is_answered_once_greedily_and_never_too_many_at_a_time():
    engine = Scripted()
    evaluator = await run(engine, settings())
    assert len(engine.asked) == 20 and engine.most == 4
    assert {(s.temperature, s.stop, s.max_new_tokens) for s in engine.asked} == {(0.0, ("!",), 8)}
    drawn = np.random.default_rng([0, 1]).integers(8, size=20)
    assert evaluator.evaluation.num_delivered == 20 and evaluator.evaluation.accuracy == (drawn % 2 == 0).mean()


async def test_what_has_not_come_in_time_is_missing_and_not_guessed():
    evaluator = await run(Scripted(wait_s=60.0), settings(timeout_s=0.1))
    assert evaluator.evaluation.missing == 20 and math.isnan(evaluator.evaluation.accuracy)
    assert evaluator.last_error.startswith("not answered within eval.timeout_s=0.1, though the engine is alive: raise")


async def test_an_engine_that_does_not_answer_is_told_from_one_that_is_slow():
    engine = Scripted(wait_s=60.0)
    engine.silent = True
    evaluator = await run(engine, settings(timeout_s=0.1))
    assert "eval.timeout_s=0.1, and the engine core has not answered for 10 s: look" in evaluator.last_error


@pytest.mark.parametrize("engine", [Scripted(ValueError("odd prompt")), Scripted(finish="error")])
async def test_an_answer_that_fails_is_unscored_and_says_why(engine: Scripted):
    evaluator = await run(engine, settings())
    assert evaluator.evaluation.unscored == 20 and evaluator.evaluation.missing == 0
    assert "odd prompt" in evaluator.last_error or "ended the answer with 'error'" in evaluator.last_error


async def test_an_answer_of_weights_that_are_no_numbers_does_not_count_as_wrong():
    evaluator = await run(Scripted(logprob=math.nan), settings())
    assert evaluator.evaluation.unscored == 20 and evaluator.evaluation.num_delivered == 0
    assert evaluator.last_error == "the engine gave log-prob nan for token 0"


async def test_a_dead_engine_ends_it():
    with pytest.raises(EngineDead, match="gone"):
        await run(Scripted(EngineDead("gone")), settings())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(random_model(tmp_path_factory.mktemp("models") / "random"))


def ask(engine: TransformersEngine, stop: tuple[str, ...] = (), length: int = 12) -> Completion:
    return asyncio.run(engine.generate(np.arange(5, 12, dtype=np.int32), Sampling(length, 0.0, stop), "0"))


def test_transformers_answers_greedily_with_its_own_log_probs(model: str):
    engine = TransformersEngine.create(settings(model), NAME)
    answer = ask(engine)
    assert len(answer.token_ids) == 12 and answer.finish_reason == "length"
    ids = torch.from_numpy(np.concatenate([answer.prompt_ids, answer.token_ids])).long()
    with torch.no_grad():
        logp = engine._model(input_ids=ids.unsqueeze(0)).logits[0, 6:-1].log_softmax(-1)
    assert logp.argmax(-1).tolist() == answer.token_ids.tolist()
    assert np.allclose(logp.max(-1).values.numpy(), answer.logprobs, atol=1e-5)


def test_transformers_ends_at_an_end_token_and_holds_it(model: str):
    engine = TransformersEngine.create(settings(model), NAME)
    whole = ask(engine).token_ids.tolist()
    engine._end_ids = {whole[4]}
    answer = ask(engine)
    assert answer.token_ids.tolist() == whole[: whole.index(whole[4]) + 1] and answer.finish_reason == "stop"


def test_transformers_ends_at_a_stop_string_and_holds_it(model: str):
    config = settings(model)
    engine = TransformersEngine.create(config, NAME)
    decode = decoder(load_tokenizer(config.model))
    whole = ask(engine).token_ids
    stop = decode(whole[3:5])
    answer = ask(engine, (stop,))
    assert answer.finish_reason == "stop" and stop in decode(answer.token_ids)
    assert stop not in decode(answer.token_ids[:-1])


def test_a_model_that_cannot_be_loaded_is_a_sentence(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        TransformersEngine.create(settings(str(tmp_path)), NAME)
