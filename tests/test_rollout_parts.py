"""The rollout's parts one by one: toy engine, scheduler."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from async_rl.envs.base import Score, Scored
from async_rl.envs.single_turn import SingleTurn
from async_rl.rollout.engine import EngineDead
from async_rl.rollout.outbox import Outbox
from async_rl.rollout.scheduler import Sampler, Scheduler, sample_seed
from async_rl.rollout.toy_engine import Script, ToyEngine
from async_rl.transport.messages import Ack, Lease
from async_rl.types import Attempt, Completion, Group, Prompt, Sampling, WeightName

V1 = WeightName(1, 0)


def toy(**script: object) -> ToyEngine:
    return ToyEngine({}, Script(**script), max_model_len=512, serving=V1)  # type: ignore[arg-type]


def lease(group_id: int = 0, n: int = 0, **other: object) -> Lease:
    fields: dict[str, object] = {
        "group_id": group_id,
        "attempt": (1, n),
        "split": "train",
        "born": (1, 0),
        "prompt_id": f"p{group_id}",
        "prompt_ids": [1, 2, 3],
        "text": "1+2=",
        "fields": {},
        "num_samples": 4,
        "max_new_tokens": 20,
        "temperature": 1.0,
        "seed": 7,
        "timeout_s": 5.0,
    }
    return Lease.model_validate(fields | other)


async def constant(prompt: Prompt, answer: str) -> Scored:
    return Scored(1.0)


class Bench:
    """A scheduler with its tasks, as a membership would run it."""

    def __init__(self, engine: ToyEngine, score: Score, num_slots: int) -> None:
        self.engine, self.score, self.num_slots = engine, score, num_slots
        self.outbox = Outbox(resend_s=5.0)
        self.counts: Counter[str] = Counter()

    async def __aenter__(self) -> Bench:
        self.tasks = await asyncio.TaskGroup().__aenter__()
        sampler = Sampler(self.engine, SingleTurn(), self.score, lambda ids: " ".join(map(str, ids)))
        self.scheduler = Scheduler(sampler, self.outbox, self.num_slots, self.tasks, self.counts)
        self.run = self.tasks.create_task(self.scheduler.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.run.cancel()
        await self.tasks.__aexit__(None, None, None)

    async def groups(self, count: int) -> list[Group]:
        async with asyncio.timeout(5):
            while len(self.outbox) < count:
                await asyncio.sleep(0.002)
        return [entry.group for entry in self.outbox._entries.values()]

    def ack(self, group: Group, outcome: str = "accepted") -> None:
        self.outbox.ack(Ack.model_validate({"group_id": group.group_id, "attempt": group.attempt, "outcome": outcome}))
        self.scheduler.wake()


def bench(engine: ToyEngine, score: Score = constant, slots: int = 8) -> Bench:
    return Bench(engine, score, slots)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


# ---- toy engine


async def generate(
    engine: ToyEngine, seed: int | None = 1, num: int = 40, temperature: float = 1.0, id: str = "r"
) -> Completion:
    return await engine.generate(np.array([1, 2], np.int32), Sampling(num, temperature, seed=seed), id)


async def test_the_toy_draws_the_same_tokens_for_the_same_seed_and_other_tokens_for_another() -> None:
    engine = toy()
    first, again, other = await generate(engine), await generate(engine), await generate(engine, seed=2)
    assert first.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()
    assert first.logprobs == pytest.approx(-math.log(8))
    assert first.finish_reason == "length"
    assert engine.generated_tokens == 120


async def test_the_toy_is_uniform_over_its_ids() -> None:
    tokens = (await generate(ToyEngine({}, Script(first_token=3), 10**5, V1), num=80_000)).token_ids
    counts = np.bincount(tokens, minlength=11)
    assert counts[:3].sum() == 0
    assert ((counts[3:] - 10_000) ** 2 / 10_000).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


async def test_a_long_tail_gives_answers_of_all_lengths_around_the_median() -> None:
    engine = toy(median_length=20, length_sigma=1.0)
    lengths = [len((await generate(engine, seed=s, num=200)).token_ids) for s in range(200)]
    assert 15 < np.median(lengths) < 27
    assert max(lengths) > 5 * np.median(lengths)


async def test_a_prompt_that_fills_the_context_is_an_error_without_tokens() -> None:
    completion = await toy().generate(np.zeros(600, np.int32), Sampling(10, 1.0, seed=1), "r")
    assert (completion.finish_reason, len(completion.token_ids)) == ("error", 0)


async def test_the_toy_samples_nothing_before_it_has_weights_to_name() -> None:
    engine = ToyEngine({}, Script(), max_model_len=512)
    running = asyncio.create_task(generate(engine))
    await asyncio.sleep(0.02)
    assert engine.generated_tokens == 0
    engine.name = V1
    engine._serving.set()
    assert len((await running).token_ids) == 40


async def test_an_aborted_request_returns_what_it_has() -> None:
    engine = toy(token_delay_s=0.005)
    running = asyncio.create_task(generate(engine, num=400))
    await until(lambda: engine.generated_tokens > 5)
    await engine.abort(["r", "unknown"])
    completion = await running
    assert completion.finish_reason == "abort"
    assert 5 < len(completion.token_ids) < 400


# ---- scheduler


def test_sample_seeds_are_stable_and_distinct() -> None:
    assert sample_seed(7, 0) == 7985665222500292864
    seeds = {sample_seed(s, i) for s in range(50) for i in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= s < 2**63 for s in seeds)


async def test_a_lease_gives_a_group_of_distinct_siblings_and_the_same_lease_gives_it_again() -> None:
    async with bench(toy()) as b:
        b.scheduler.lease(lease(0))
        b.scheduler.lease(lease(1))
        first, second = await b.groups(2)
    assert (first.group_id, first.attempt, first.split) == (0, Attempt(1, 0), "train")
    answers = [tuple(t.token_ids) for t in first.trajectories]
    assert len(set(answers)) == 4
    assert answers == [tuple(t.token_ids) for t in second.trajectories]
    assert all(t.reward == 1.0 and t.mask.all() and t.num_tokens == 20 for t in first.trajectories)
    assert b.counts["tokens_delivered"] == b.engine.generated_tokens == 160


async def test_groups_beyond_the_slots_wait_for_an_ack_and_evaluations_do_not() -> None:
    async with bench(toy(), slots=2) as b:
        for group_id in range(4):
            b.scheduler.lease(lease(group_id))
        b.scheduler.lease(lease(100, split="eval", temperature=0.0))
        groups = await b.groups(3)
        await asyncio.sleep(0.02)
        assert sorted(g.group_id for g in groups) == [0, 1, 100]
        assert b.scheduler.free_slots == 0
        b.ack(next(g for g in groups if g.group_id == 0))
        assert sorted(g.group_id for g in await b.groups(3)) == [1, 2, 100]
        for group in await b.groups(3):
            b.ack(group)
        (last,) = await b.groups(1)
        b.ack(last)
        assert (last.group_id, b.scheduler.free_slots) == (3, 2)


async def test_what_was_leased_in_one_breath_begins_together() -> None:
    async with bench(toy(), slots=4) as b:
        begun: list[int] = []

        @asynccontextmanager
        async def together(num_requests: int) -> AsyncIterator[None]:
            begun.append(num_requests)
            yield

        b.engine.together = together
        b.scheduler.lease(lease(0, more=True))
        b.scheduler.lease(lease(1, more=True))
        await asyncio.sleep(0.02)
        assert (begun, b.scheduler.num_running) == ([], 0)
        b.scheduler.lease(lease(2))
        await b.groups(3)
        assert begun == [12]


async def test_a_greedy_lease_answers_alike() -> None:
    async with bench(toy()) as b:
        b.scheduler.lease(lease(temperature=0.0))
        (group,) = await b.groups(1)
    assert len({tuple(t.token_ids) for t in group.trajectories}) == 1


class Recorder(ToyEngine):
    """Remembers how each answer was asked for, in order of arrival."""

    def __init__(self) -> None:
        super().__init__({}, Script(), max_model_len=512, serving=V1)
        self.asked: list[tuple[str, Sampling]] = []

    async def generate(self, prompt_ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        self.asked.append((request_id, sampling))
        return await super().generate(prompt_ids, sampling, request_id)


async def test_the_greedy_sibling_is_the_last_one_and_the_others_are_as_without_it() -> None:
    engine = Recorder()
    async with bench(engine) as b:
        b.scheduler.lease(lease(0, num_samples=4, greedy=True))
        b.scheduler.lease(lease(1, num_samples=3))
        b.scheduler.lease(lease(2, num_samples=1, temperature=0.0))
        groups = {g.group_id: g for g in await b.groups(3)}
    greedy = [request_id for request_id, sampling in engine.asked if sampling.temperature == 0]
    assert greedy == ["0.0.3.1", "2.0.0.1"], "group, attempt, sibling, turn"
    assert all((sampling.seed is None) == (sampling.temperature == 0) for _, sampling in engine.asked)
    answers = {i: [tuple(t.token_ids) for t in g.trajectories] for i, g in groups.items()}
    assert answers[0] == answers[1] + answers[2]
    last = groups[0].trajectories[-1]
    assert np.isfinite(last.logprobs).all() and (last.logprobs <= 0).all() and last.mask.all() and last.reward == 1.0


async def test_one_failing_sample_costs_itself_and_not_the_group() -> None:
    async with bench(toy(fault="raise", fault_requests=(2,))) as b:
        b.scheduler.lease(lease())
        (group,) = await b.groups(1)
    bad = [t for t in group.trajectories if t.error]
    assert len(group.trajectories) == 4
    assert len(bad) == b.counts["samples_invalid"] == 1
    assert math.isnan(bad[0].reward)
    assert "RuntimeError: scripted fault in request 2" in bad[0].error


async def test_a_raising_score_makes_invalid_trajectories() -> None:
    async def score(prompt: Prompt, answer: str) -> Scored:
        raise ZeroDivisionError("reward bug")

    async with bench(toy(), score) as b:
        b.scheduler.lease(lease())
        (group,) = await b.groups(1)
    assert all(math.isnan(t.reward) and "ZeroDivisionError: reward bug" in t.error for t in group.trajectories)


async def test_nan_rewards_and_nan_log_probs_are_counted_and_named() -> None:
    async def score(prompt: Prompt, answer: str) -> Scored:
        return Scored(math.nan, "no number")

    async with bench(toy(fault="nan", fault_requests=(0,))) as b:
        b.scheduler.lease(lease())
        (group,) = await b.groups(1)
    assert ["log-prob nan for token 10" in t.error for t in group.trajectories] == [True, False, False, False]
    assert [math.isnan(t.reward) for t in group.trajectories] == [True, False, False, False], "an evaluation counts rewards"
    async with bench(toy(), score) as b:
        b.scheduler.lease(lease())
        await b.groups(1)
    assert b.counts["samples_invalid"] == 4


async def test_an_answer_the_engine_aborts_is_marked() -> None:
    async with bench(toy(fault="abort", fault_requests=(1,))) as b:
        b.scheduler.lease(lease())
        (group,) = await b.groups(1)
    assert [t.finish_reason for t in group.trajectories].count("abort") == b.counts["finish/abort"] == 1
    assert [bool(t.error) for t in group.trajectories].count(True) == 1


async def test_a_swallowed_request_expires_with_its_lease_and_frees_the_slot(caplog: pytest.LogCaptureFixture) -> None:
    async with bench(toy(fault="hang", fault_requests=(2,)), slots=1) as b:
        b.scheduler.lease(lease(5, timeout_s=0.1))
        b.scheduler.lease(lease(6))
        (group,) = await b.groups(1)
        assert group.group_id == 6
        assert b.counts["groups_expired"] == 1
        assert not b.engine._requests
    assert "group 5 (prompt p5) expired after 0.1 s" in caplog.text


async def test_cancel_ends_the_requests_and_frees_the_slot() -> None:
    async with bench(toy(token_delay_s=0.01), slots=1) as b:
        b.scheduler.lease(lease(0, max_new_tokens=400))
        b.scheduler.lease(lease(1))
        b.scheduler.lease(lease(2))
        await until(lambda: len(b.engine._requests) == 4)
        b.scheduler.cancel(2, Attempt(1, 0))
        b.scheduler.cancel(0, Attempt(1, 9))
        b.scheduler.cancel(0, Attempt(1, 0))
        (group,) = await b.groups(1)
        assert group.group_id == 1
        assert not b.engine._requests
        assert b.counts["groups_cancelled"] == 2
        assert b.counts["cancels_too_late"] == 1
        assert b.scheduler.num_running == 0


async def test_a_repeated_lease_is_sampled_once() -> None:
    async with bench(toy()) as b:
        b.scheduler.lease(lease())
        b.scheduler.lease(lease())
        await b.groups(1)
        await asyncio.sleep(0.01)
    assert (b.counts["leases_repeated"], b.engine.generated_tokens) == (1, 80)


async def test_a_dead_engine_ends_the_membership() -> None:
    async def run() -> None:
        async with bench(toy(fault="die", fault_requests=(1,))) as b:
            b.scheduler.lease(lease())
            await b.run

    with pytest.raises(BaseExceptionGroup) as caught:
        await run()
    assert isinstance(caught.value.exceptions[0], EngineDead)
