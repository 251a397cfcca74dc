"""A weight's way into a rollout, over a real gloo group, and what may go wrong on it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch

from async_rl.rollout.toy_engine import Script
from async_rl.transport.messages import (
    Committed,
    Error,
    Goodbye,
    Heartbeat,
    Hello,
)
from async_rl.weights.group import listen
from async_rl.weights.source import WeightSource
from tests.rollout_fakes import PHASE_S, stage


async def test_a_wrong_bucket_digest_is_never_committed(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        await learner.prepare(1)
        digests = await learner.stage(1)
        learner.commit(1, [*digests[:-1], "0" * 64])
        error = await learner.hears(Error)
        assert error.code == "weights"
        assert "1 with another digest" in error.text
        assert s.engine.name == (1, 0)
        assert (await learner.publish(1)).version == 1


async def test_a_foreign_manifest_is_refused_before_a_byte_moves(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner()
        await learner.hears(Hello)
        learner.source = WeightSource([("embed.weight", torch.zeros(3, 3))], torch.float32, 1024)
        learner.membership = 1
        learner.send(learner.prepare_message(0, port=1))
        assert "do not fit this engine (missing: head.weight, norm.weight" in (await learner.hears(Error)).text
        assert s.worker.counts["updates_failed"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the backend can be had")
async def test_a_backend_that_this_host_cannot_have_is_told_to_the_learner_at_once(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner()
        await learner.hears(Hello)
        learner.membership = 1
        sock, port = listen("127.0.0.1")
        learner.send(learner.prepare_message(0, port, backend="nccl"))
        error = await learner.hears(Error)
        assert error.code == "weights" and "nccl" in error.text
        assert not s.task.done(), "the rollout lives on"
        sock.close()
        assert (await learner.publish(0)).version == 0


async def test_a_newer_prepare_supersedes_a_transfer_that_never_comes(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.prepare(0)
        started = time.monotonic()
        await learner.publish(0)  # a new membership, while the first one waits for bytes
        assert time.monotonic() - started < PHASE_S
        assert s.worker.counts["updates_superseded"] == 1
        assert not [m for m in learner.said if isinstance(m, Error)]


async def test_messages_of_another_membership_or_life_are_ignored(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.prepare(0)
        digests = await learner.stage(0)
        learner.membership = 7
        learner.commit(0, digests)
        learner.membership = 1
        learner.send(learner.prepare_message(0, port=1, incarnation=9))
        learner.send(learner.prepare_message(0, port=1, membership=0))
        learner.lease(1, born=(9, 0))
        learner.commit(0, digests)
        await learner.hears(Committed)
        assert s.worker.counts["updates_ignored"] == 3
        assert s.worker.counts["messages_ignored"] == 1


async def test_an_engine_that_freezes_in_an_update_is_reported_within_the_phase(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        s.engine.script = Script(frozen=("prepare",))
        learner.membership = 2
        started = time.monotonic()
        learner.send(learner.prepare_message(1, port=1))
        assert "did not answer prepare within 2 s" in (await learner.hears(Error)).text
        assert time.monotonic() - started < PHASE_S + 1


async def test_a_frozen_engine_says_so_joins_nothing_and_comes_back(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        s.engine.script = Script(frozen=("ping",))
        await learner.hears(Heartbeat, where=lambda m: m.engine_age_s > 0.3)
        learner.send(Error(code="rejoin", text="its engine core has not answered"))
        await asyncio.sleep(0.5)
        assert len([m for m in learner.said if isinstance(m, Hello)]) == 1
        s.engine.script = Script()
        await learner.hears(Hello, count=2)
        beat = await learner.hears(Heartbeat, count=len([m for m in learner.said if isinstance(m, Heartbeat)]) + 1)
        assert beat.engine_age_s < 0.3


async def test_an_engine_that_dies_while_it_is_asked_is_noticed_at_the_next_question(tmp_path: Path) -> None:
    async with stage(tmp_path, connect_timeout_s=30) as s:
        learner = s.learner()
        await learner.hears(Hello)
        s.engine.script = Script(frozen=("ping",))
        await learner.hears(Heartbeat, where=lambda m: m.engine_age_s > 0.2)
        s.engine._dead = True
        assert "EngineDead" in (await learner.hears(Goodbye)).reason


async def test_a_commit_is_not_cut_short_by_a_rejoin(tmp_path: Path) -> None:
    async with stage(tmp_path, Script(frozen=("commit",), frozen_s=0.5)) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.prepare(0)
        learner.commit(0, await learner.stage(0))
        await learner.hears(Heartbeat, where=lambda m: m.phase == "committing 1:0")
        learner.send(Error(code="rejoin", text="too slow"))
        await learner.hears(Hello, count=2)
        assert s.engine.name == (1, 0)
        assert s.engine._serving.is_set()
        await learner.publish(0)
