"""Leases in, scored groups out: every sample of every lease runs at once, under the lease's deadline.

Owns the work in flight of one membership; imports envs, transport messages and the Engine protocol. Invariants: a lease
ends in exactly one of delivered, cancelled, expired, dropped (counted); one bad sample makes an invalid trajectory, never a
lost group; training groups in flight and unacknowledged never exceed num_slots, evaluation leases hold no slot.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from async_rl.envs.base import Env, Score
from async_rl.observability import stacks
from async_rl.observability.log import get_logger
from async_rl.observability.waiting import waiting
from async_rl.rollout.engine import Engine, EngineDead
from async_rl.rollout.outbox import Outbox
from async_rl.transport.messages import Lease
from async_rl.types import Attempt, Completion, Group, Prompt, Sampling, Trajectory

log = get_logger(__name__)
Key = tuple[int, Attempt]


@dataclass(frozen=True)
class Sampler:
    """What turns one prompt into one scored trajectory."""

    engine: Engine
    env: Env
    score: Score
    decode: Callable[[np.ndarray], str]


@dataclass
class _Job:
    lease: Lease
    received_s: float
    task: asyncio.Task[None] | None = None
    cancelled: bool = False  # by the learner, as opposed to the end of the membership

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.received_s


class Scheduler:
    """One per membership; its tasks live in the TaskGroup it is given, so EngineDead ends that group."""

    def __init__(
        self, sampler: Sampler, outbox: Outbox, num_slots: int, tasks: asyncio.TaskGroup, counts: Counter[str]
    ) -> None:
        self.counts = counts
        self._sampler, self._outbox, self._num_slots, self._tasks = sampler, outbox, num_slots, tasks
        self._jobs: dict[Key, _Job] = {}  # in order of arrival
        self._changed = asyncio.Event()
        self._more = False  # the rest of what was leased in one breath is on its way

    @property
    def num_leases(self) -> int:
        """Leases that are neither delivered nor given up."""
        return len(self._jobs)

    @property
    def num_running(self) -> int:
        """Leases being sampled or scored, evaluation included."""
        return sum(job.task is not None for job in self._jobs.values())

    @property
    def free_slots(self) -> int:
        """Training groups that may be leased to this process now."""
        held = sum(job.lease.split == "train" for job in self._jobs.values())
        return max(0, self._num_slots - held - self._outbox.num_train)

    async def run(self) -> None:
        """Start leases as slots become free, until cancelled."""
        while True:
            self._changed.clear()
            keys = [] if self._more else self._startable()
            if keys:
                async with self._sampler.engine.together(sum(self._jobs[key].lease.num_samples for key in keys)):
                    for key in keys:
                        job = self._jobs[key]
                        job.task = self._tasks.create_task(self._run(key, job), name=f"group {key[0]}")
            with waiting(self._awaited(), normal=True):  # anew with every change: what is told has stood still
                await self._changed.wait()

    def _awaited(self) -> str:
        oldest = next(iter(self._jobs), None)
        if oldest is None:
            return "a lease"
        return f"{len(self._jobs)} leased groups to be sampled and scored, the oldest of them {oldest[0]}"

    def wake(self) -> None:
        """To be called when a slot may have become free outside: an Ack."""
        self._changed.set()

    def lease(self, lease: Lease) -> None:
        """Start the lease, or queue it while every slot is taken; a repeated (group id, attempt) is counted and ignored."""
        key = (lease.group_id, Attempt(*lease.attempt))
        self._more = lease.more
        self._changed.set()
        if key in self._jobs:
            self.counts["leases_repeated"] += 1
            return
        self.counts["leases"] += 1
        self._jobs[key] = _Job(lease, time.monotonic())

    def cancel(self, group_id: int, attempt: Attempt) -> None:
        """Stop this attempt and free its slot; nothing is delivered for it."""
        job = self._jobs.get((group_id, attempt))
        if job is None:
            self.counts["cancels_too_late"] += 1
            return
        self.counts["groups_cancelled"] += 1
        job.cancelled = True
        if job.task is None:
            del self._jobs[group_id, attempt]
        else:
            job.task.cancel()

    def drop_waiting(self) -> None:
        """After the end of the membership, which has cancelled what ran: forget what had not begun."""
        self.counts["groups_dropped"] += len(self._jobs)
        self._jobs.clear()

    def _startable(self) -> list[Key]:
        running = sum(job.task is not None and job.lease.split == "train" for job in self._jobs.values())
        free = self._num_slots - running - self._outbox.num_train
        waiting = [(key, job.lease.split) for key, job in self._jobs.items() if job.task is None]
        train = [key for key, split in waiting if split == "train"]
        return [key for key, split in waiting if split == "eval"] + train[: max(0, free)]

    async def _run(self, key: Key, job: _Job) -> None:
        try:
            async with asyncio.timeout(max(0.0, job.lease.timeout_s - job.age_s)):
                async with asyncio.TaskGroup() as siblings:
                    samples = [siblings.create_task(self._sample(job, i)) for i in range(job.lease.num_samples)]
            self._deliver(key, job, tuple(s.result() for s in samples))
        except TimeoutError:
            self.counts["groups_expired"] += 1
            log.warning("group %d (prompt %s) expired after %.1f s", key[0], job.lease.prompt_id, job.age_s)
            stacks.dump(f"the lease of group {key[0]} has expired", self._sampler.engine.core_pid)
        except asyncio.CancelledError:
            self.counts["groups_dropped"] += not job.cancelled
            raise
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # EngineDead, the one thing a sample lets through
        finally:
            self._jobs.pop(key, None)
            self._changed.set()

    def _deliver(self, key: Key, job: _Job, trajectories: tuple[Trajectory, ...]) -> None:
        prompt_ids = np.asarray(job.lease.prompt_ids, dtype=np.int32)
        group = Group(key[0], key[1], job.lease.split, "", prompt_ids, trajectories)  # the outbox names the sender
        self.counts["groups_delivered"] += 1
        self.counts["tokens_delivered"] += group.num_tokens
        self._outbox.put(group)

    async def _sample(self, job: _Job, index: int) -> Trajectory:
        lease = job.lease
        prompt = Prompt(lease.prompt_id, np.asarray(lease.prompt_ids, dtype=np.int32), lease.text, lease.fields)
        temperature = 0.0 if lease.greedy and index == lease.num_samples - 1 else lease.temperature
        seed = sample_seed(lease.seed, index) if temperature > 0 else None
        sampling = Sampling(lease.max_new_tokens, temperature, tuple(lease.stop), seed)
        turn = 0

        async def generate(prompt_ids: np.ndarray, sampling: Sampling) -> Completion:
            nonlocal turn
            turn += 1
            return await self._generate(prompt_ids, sampling, f"{lease.group_id}.{lease.attempt[1]}.{index}.{turn}")

        sampler = self._sampler
        try:
            trajectory = await sampler.env.run(prompt, sampling, generate, sampler.score, sampler.decode)
            return self._screened(trajectory)
        except EngineDead:
            raise
        except Exception as e:  # an environment's or reward's bug must not cost the siblings
            self.counts["samples_invalid"] += 1
            text = f"{type(e).__name__}: {e}"
            log.warning("group %d sample %d (prompt %s) failed: %s", lease.group_id, index, lease.prompt_id, text)
            return failed_trajectory(text)

    async def _generate(self, prompt_ids: np.ndarray, sampling: Sampling, request_id: str) -> Completion:
        """An engine ends a request whose `generate` is cancelled: that is how Cancel, deadline and rejoin reach it."""
        completion = await self._sampler.engine.generate(prompt_ids, sampling, request_id)
        self.counts["tokens_sampled"] += len(completion.token_ids)
        self.counts[f"finish/{completion.finish_reason}"] += 1
        return completion

    def _screened(self, trajectory: Trajectory) -> Trajectory:
        """Count what cannot be trained on; the learner refuses it, here the engine that made it is known."""
        trajectory = screened(trajectory)
        if trajectory.error or not np.isfinite(trajectory.reward):
            self.counts["samples_invalid"] += 1
            log.warning("a sample is invalid: %s", trajectory.error or f"its reward is {trajectory.reward}")
        return trajectory


def screened(trajectory: Trajectory) -> Trajectory:
    """Without a reward if a log-prob is no number: weights that have become NaN still answer, and would be counted as wrong."""
    finite = np.isfinite(trajectory.logprobs)
    if finite.all():
        return trajectory
    at = int(np.argmin(finite))
    error = f"the engine gave log-prob {trajectory.logprobs[at]} for token {at}"
    return replace(trajectory, reward=math.nan, scores={}, error=error)


def sample_seed(seed: int, index: int) -> int:
    """The seed of sibling `index` under a lease's seed: stable over processes and machines, 63 bits."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def failed_trajectory(error: str) -> Trajectory:
    """An invalid trajectory: no tokens, reward NaN, and the reason."""
    none = np.zeros(0, dtype=np.int32)
    return Trajectory(none, np.zeros(0, np.float32), none, none, np.zeros(0, bool), "error", float("nan"), error[:1000])
