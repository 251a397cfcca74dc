"""The rollout worker against a learner over memory: memberships, leases, the learner's faults."""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.rollout.engine import EngineDead
from async_rl.rollout.join import Fatal, Unreachable
from async_rl.rollout.toy_engine import Script
from async_rl.transport import memory
from async_rl.transport.discovery import write_discovery
from async_rl.transport.messages import (
    Cancel,
    Committed,
    End,
    Error,
    Goodbye,
    Heartbeat,
    Hello,
    Prepared,
)
from tests.rollout_fakes import parameters, stage

# ---- the happy way


async def test_a_rollout_joins_takes_weights_then_leases_and_leaves_at_end(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner()
        hello = await learner.hears(Hello)
        assert (hello.name, hello.run_id, hello.num_slots) == ("rollout-0", "run", 4)
        committed = await learner.publish(0)
        assert committed.checksum == learner.source.checksum()
        for group_id in range(6):
            learner.lease(group_id)
        groups = await learner.gets(6)
        assert {g.group_id for g in groups} == set(range(6))
        assert {g.rollout_id for g in groups} == {"rollout-0#1"}
        assert all((t.versions == 0).all() and (t.incarnations == 1).all() for g in groups for t in g.trajectories)
        beat = await learner.hears(Heartbeat, where=lambda m: m.generated_tokens == 240 and m.free_slots == 4)
        assert (beat.phase, beat.num_running) == ("idle", 0)
        learner.send(End(reason="done"))
        assert await asyncio.wait_for(s.task, 5) == "done"
        assert s.worker.summary()["groups_unacknowledged"] == 0


async def test_an_update_in_the_middle_of_an_answer_splits_its_versions_exactly(tmp_path: Path) -> None:
    async with stage(tmp_path, Script(token_delay_s=0.002)) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        learner.lease(1, max_new_tokens=400, num_samples=3)
        await learner.hears(Heartbeat, where=lambda m: m.generated_tokens > 30)
        for value in learner.source._tensors:
            value.add_(1.0)
        at = s.engine.generated_tokens
        committed = await learner.publish(1)
        assert committed.checksum == learner.source.checksum()
        assert s.engine.generated_tokens > at  # it generated on while weights arrived
        torch.testing.assert_close(s.engine.parameters["norm.weight"], parameters()["norm.weight"] + 1)
        (group,) = await learner.gets(1)
        for t in group.trajectories:
            split = int(np.argmax(t.versions == 1))
            assert 0 < split < 400
            assert (t.versions[:split] == 0).all()
            assert (t.versions[split:] == 1).all()


async def test_sixteen_answers_in_flight_all_live_through_an_update(tmp_path: Path) -> None:
    async with stage(tmp_path, Script(token_delay_s=0.005), heartbeat_timeout_s=10.0) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        for group_id in range(4):
            learner.lease(group_id, max_new_tokens=400, num_samples=4)
        await learner.hears(Heartbeat, where=lambda m: m.num_running == 4 and m.generated_tokens > 16)
        await learner.publish(1)
        answers = [t for group in await learner.gets(4) for t in group.trajectories]
        assert [t.finish_reason for t in answers] == ["length"] * 16
        assert all({*t.versions.tolist()} == {0, 1} and (np.diff(t.versions) >= 0).all() for t in answers)


async def test_a_second_update_of_the_same_membership_needs_no_address(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        learner.send(learner.prepare_message(1, port=0))
        await learner.hears(Prepared, where=lambda m: m.version == 1)
        learner.commit(1, await learner.stage(1))
        await learner.hears(Committed, where=lambda m: m.version == 1)
        assert s.engine.name == (1, 1)


async def test_an_evaluation_is_greedy_and_holds_no_slot(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        for group_id in range(40, 60):
            learner.lease(group_id, split="eval", temperature=0.0, num_samples=1)
        groups = await learner.gets(20)
        assert {g.split for g in groups} == {"eval"}
        assert len({tuple(g.trajectories[0].token_ids) for g in groups}) == 1  # the same prompt, greedily


async def test_a_cancelled_lease_is_never_delivered(tmp_path: Path) -> None:
    async with stage(tmp_path, Script(token_delay_s=0.005)) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        learner.lease(1, max_new_tokens=400)
        await learner.hears(Heartbeat, where=lambda m: m.num_running == 1 and m.free_slots == 3)
        learner.send(Cancel(group_id=1, attempt=(1, 0), reason="too old"))
        await learner.hears(Heartbeat, where=lambda m: m.num_running == 0 and m.generated_tokens > 0)
        learner.lease(2)
        assert [g.group_id for g in await learner.gets(1)] == [2]
        assert s.worker.counts["groups_cancelled"] == 1


# ---- the learner's faults


async def test_a_new_life_of_the_learner_gets_the_unacknowledged_groups_again(tmp_path: Path) -> None:
    async with stage(tmp_path, Script(token_delay_s=0.001)) as s:
        first = s.learner(1, ack=False)
        await first.hears(Hello)
        await first.publish(0)
        for group_id in (1, 2, 3):
            first.lease(group_id)
        first.lease(4, max_new_tokens=900)
        await first.gets(3)
        first.ack(first.groups[0])
        first.ack(first.groups[0], "duplicate")
        await asyncio.sleep(0.05)
        second = s.learner(2)
        await second.hears(Hello)
        groups = await second.gets(2)
        assert [g.group_id for g in groups] == [g.group_id for g in first.groups[1:3]]
        assert {g.rollout_id for g in groups} == {"rollout-0#1"}
        assert not s.engine._requests  # what was in flight for the lost life is gone
        assert s.worker.counts["groups_dropped"] == 1
        await second.publish(5)
        assert s.engine.name == (2, 5)
        second.lease(9)
        assert (await second.gets(3))[2].trajectories[0].versions.tolist() == [5] * 20
        assert s.worker.outbox.counts["ack/again"] == 1


async def test_a_silent_learner_is_left_and_found_again(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner(ack=False)
        await learner.hears(Hello)
        await learner.publish(0)
        learner.lease(1)
        await learner.gets(1)
        learner.beating = False
        await learner.hears(Hello, count=2)
        learner.beating = True
        async with asyncio.timeout(5):
            while "rollout-0#2" not in {g.rollout_id for g in learner.groups}:
                await asyncio.sleep(0.002)
        assert {g.group_id for g in learner.groups} == {1}


async def test_error_rejoin_drops_leases_and_staging(tmp_path: Path) -> None:
    async with stage(tmp_path, Script(token_delay_s=0.005)) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        learner.lease(1, max_new_tokens=900)
        await learner.prepare(1)
        learner.send(Error(code="rejoin", text="expelled"))
        await learner.hears(Hello, count=2)
        assert not s.engine._requests
        assert s.engine._receiver is None
        assert (await learner.publish(1)).version == 1


async def test_error_fatal_ends_the_process_with_the_learners_sentence(tmp_path: Path) -> None:
    async with stage(tmp_path) as s:
        learner = s.learner()
        learner.refusal = Error(code="fatal", text="its config digest is a, the learner's is b")
        with pytest.raises(Fatal, match="its config digest is a, the learner's is b"):
            await asyncio.wait_for(s.task, 5)


async def test_who_looks_for_the_learner_of_a_run_that_has_finished_meanwhile_ends_at_once(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    result.write_text('{"status": "finished", "policy_version": 30}')
    os.utime(result, (1e9, 1e9))  # an earlier run, which this one goes on with
    async with stage(tmp_path, connect_timeout_s=20.0) as s:
        await asyncio.sleep(0.5)
        assert not s.task.done()
        result.write_text('{"status": "stopped", "policy_version": 30}')  # it may be started again
        await asyncio.sleep(0.5)
        assert not s.task.done()
        result.write_text('{"status": "finished", "policy_version": 30}')
        assert await asyncio.wait_for(s.task, 5) == f"the run in {tmp_path} has finished its 30 steps: nobody is left to join"


async def test_no_learner_at_all_ends_with_a_sentence_that_names_the_file(tmp_path: Path) -> None:
    async with stage(tmp_path, connect_timeout_s=0.3) as s:
        with pytest.raises(Unreachable, match=r"rollout-0 heard nothing .* 0.3 s: looked in .*learner.json, which names no"):
            await asyncio.wait_for(s.task, 5)


async def test_a_dead_address_in_the_file_is_named(tmp_path: Path) -> None:
    write_discovery(tmp_path / "learner.json", {"control_address": "memory://nobody", "incarnation": 1, "run_id": "run"})
    async with stage(tmp_path, connect_timeout_s=0.3) as s:
        with pytest.raises(Unreachable, match=r"looked at memory://nobody \(from .*learner.json\)"):
            await asyncio.wait_for(s.task, 5)


async def test_a_dead_address_is_given_up_as_soon_as_the_file_names_another(tmp_path: Path) -> None:
    write_discovery(tmp_path / "learner.json", {"control_address": "memory://nobody", "incarnation": 1, "run_id": "run"})
    async with stage(tmp_path, heartbeat_timeout_s=30) as s:
        await asyncio.sleep(0.1)
        started = time.monotonic()
        await s.learner(2).hears(Hello)
        assert time.monotonic() - started < 1.0


async def test_a_dead_engine_says_goodbye_and_ends_the_process(tmp_path: Path) -> None:
    async with stage(tmp_path, Script(fault="die")) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        learner.lease(1)
        assert "EngineDead: the toy engine died" in (await learner.hears(Goodbye)).reason
        with pytest.raises(EngineDead):
            await asyncio.wait_for(s.task, 5)


async def test_invalid_samples_travel_in_a_full_group(tmp_path: Path) -> None:
    async with stage(tmp_path, Script(fault="raise", fault_requests=(0,))) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        learner.lease(1)
        (group,) = await learner.gets(1)
        assert [math.isnan(t.reward) for t in group.trajectories].count(True) == 1


async def test_a_learner_that_reads_nothing_does_not_stop_heartbeats_or_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path, Script(token_delay_s=0.001)) as s:
        learner = s.learner()
        await learner.hears(Hello)
        await learner.publish(0)
        monkeypatch.setattr(memory, "DATA_QUEUE", 0)
        for group_id in range(4):
            learner.lease(group_id)
        await learner.hears(Heartbeat, where=lambda m: m.generated_tokens == 160)
        await learner.hears(Heartbeat, count=10, where=lambda m: m.generated_tokens == 160 and m.free_slots == 0)
        assert not learner.groups
        monkeypatch.undo()
        assert len(await learner.gets(4)) == 4
