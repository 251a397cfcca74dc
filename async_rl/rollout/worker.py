"""The rollout process: find the learner, serve one membership, find it again, until End.

Owns the order of things and nothing else: leases are the scheduler's, finished groups the outbox's, weights the updates'.
Invariants: no lease or staged weight outlives its membership, every finished group does; the control reader never waits
for an engine; every wait is bounded by a deadline of the configuration.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from async_rl.config import Config, TransportConfig
from async_rl.observability import stacks
from async_rl.observability.log import get_logger
from async_rl.observability.waiting import waiting
from async_rl.rollout.engine import EngineDead
from async_rl.rollout.join import Door, Ended, Fatal, Joined, Rejoin
from async_rl.rollout.outbox import Outbox
from async_rl.rollout.scheduler import Sampler, Scheduler
from async_rl.rollout.updates import Updates
from async_rl.transport.base import TransportError
from async_rl.transport.messages import Ack, Cancel, Commit, End, Error, Goodbye, Heartbeat, Lease, Message, Prepare
from async_rl.types import Attempt

log = get_logger(__name__)
GOODBYE_S = 1.0  # longest wait for the last word to leave


class Worker:
    def __init__(self, config: Config, sampler: Sampler, door: Door) -> None:
        self.config, self.sampler, self.door = config, sampler, door
        self.counts: Counter[str] = Counter()
        self.outbox = Outbox(resend_s=config.transport.heartbeat_timeout_s)
        self.pulse = Pulse(sampler, config.transport)
        self.membership: Membership | None = None  # while it serves one

    async def run(self) -> str:
        """Serve until the learner ends the run; returns its reason. Raises Fatal, Unreachable or EngineDead."""
        while True:
            await self.pulse.check()
            try:
                joined = await self.door.join()
            except Ended as end:
                return str(end)
            self.pulse.restart()  # the wait for a learner may have been long; its first heartbeat must not say so
            log.info("joined as %s, incarnation %d", joined.welcome.rollout_id, joined.welcome.incarnation)
            membership = self.membership = Membership(self, joined)
            try:
                await membership.serve()
            except Ended as end:
                joined.link.close(0.0)
                return str(end)
            except Rejoin as why:
                log.warning("%s says Hello again: %s", joined.welcome.rollout_id, why)
                self.counts["rejoins"] += 1
                joined.link.close(0.0)
                await membership.abandon()
            except BaseException as why:
                await membership.goodbye(_reason(why))
                raise
            finally:
                self.membership = None

    def status(self) -> dict[str, Any]:
        """For people, from another thread."""
        engine, membership = self.sampler.engine, self.membership
        said = {"weights": engine.serving, "unacknowledged": len(self.outbox), "core": engine.core_pid}
        said |= {"core_age_s": self.pulse.age_s, "state": "joining", "leases": 0, "delivered": self.counts["groups_delivered"]}
        return said | (membership.status() if membership else {})

    def summary(self) -> dict[str, int]:
        """Everything counted, for the log's last line."""
        own = {"tokens_generated": self.sampler.engine.generated_tokens, "groups_unacknowledged": len(self.outbox)}
        return {**own, **self.counts, **self.outbox.counts}


class Membership:
    """One stay with one life of the learner."""

    def __init__(self, worker: Worker, joined: Joined) -> None:
        self.worker, self.link, self.welcome = worker, joined.link, joined.welcome
        self.scheduler: Scheduler | None = None
        self.updates: Updates | None = None
        self.heard_s = time.monotonic()

    def status(self) -> dict[str, Any]:
        """What `Worker.status` knows only of a member."""
        said = {"id": self.welcome.rollout_id, "learner_age_s": time.monotonic() - self.heard_s, "state": self.phase}
        return said | ({"leases": self.scheduler.num_leases} if self.scheduler else {})

    @property
    def phase(self) -> str:
        """What it does, in a word or two."""
        sampling = self.scheduler is not None and self.scheduler.num_running
        return (self.updates.phase if self.updates else "") or ("sampling" if sampling else "idle")

    async def serve(self) -> None:
        """Read, beat, watch, push, until one of them ends it; raises Ended, Rejoin, Fatal or EngineDead."""
        worker, config = self.worker, self.worker.config
        engine, counts = worker.sampler.engine, worker.counts
        try:
            async with asyncio.TaskGroup() as tasks:
                self.scheduler = Scheduler(worker.sampler, worker.outbox, config.rollout.num_slots, tasks, counts)
                self.updates = Updates(
                    engine, self.link.send, config.weights.in_flight, self.welcome.incarnation, tasks, counts
                )
                self._together(
                    tasks,
                    self.scheduler.run(),
                    self._read(self.scheduler, self.updates),
                    self._beat(self.scheduler),
                    self._watch(),
                    worker.outbox.run(self.link, self.welcome.rollout_id),
                    worker.pulse.run(),
                )
        except BaseExceptionGroup as group:
            raise _worst(group) from None

    @staticmethod
    def _together(tasks: asyncio.TaskGroup, *jobs: Coroutine[None, None, None]) -> None:
        for job in jobs:
            tasks.create_task(job)

    async def _read(self, scheduler: Scheduler, updates: Updates) -> None:
        while True:
            message = await self.link.recv()
            self.heard_s = time.monotonic()
            match message:
                case Lease():
                    self._lease(scheduler, message)
                case Cancel():
                    scheduler.cancel(message.group_id, Attempt(*message.attempt))
                case Ack():
                    self.worker.outbox.ack(message)
                    scheduler.wake()
                case Prepare():
                    updates.prepare(message)
                case Commit():
                    updates.commit(message)
                case End():
                    raise Ended(message.reason)
                case Error():
                    self._error(message)
                case Heartbeat():
                    pass
                case _:
                    self._unexpected(message)

    def _lease(self, scheduler: Scheduler, lease: Lease) -> None:
        if lease.born[0] != self.welcome.incarnation:
            self._unexpected(lease)
            return
        scheduler.lease(lease)

    def _error(self, error: Error) -> None:
        if f"{self.welcome.rollout_id} was expelled" in error.text:  # it did not do something in time: what did it do?
            stacks.dump(f"the learner says: {error.text}", self.worker.sampler.engine.core_pid)
        if error.code == "fatal":
            raise Fatal(error.text)
        if error.code == "rejoin":
            raise Rejoin(error.text)
        log.warning("the learner reports %s: %s", error.code, error.text)

    def _unexpected(self, message: Message) -> None:
        self.worker.counts["messages_ignored"] += 1
        log.warning("ignored a message that does not belong here: %s", repr(message)[:200])

    async def _beat(self, scheduler: Scheduler) -> None:
        engine, pulse = self.worker.sampler.engine, self.worker.pulse
        while True:
            beat = Heartbeat(
                free_slots=scheduler.free_slots,
                num_running=scheduler.num_running,
                generated_tokens=engine.generated_tokens,
                engine_age_s=pulse.age_s,
                phase=self.phase,
            )
            await self.link.send(beat)
            await asyncio.sleep(pulse.every_s)

    async def _watch(self) -> None:
        """A learner that falls silent, or a new life of it in the discovery file, ends the membership."""
        transport = self.worker.config.transport
        while True:
            await asyncio.sleep(min(transport.heartbeat_s, transport.heartbeat_timeout_s / 4))
            silence_s = time.monotonic() - self.heard_s
            if silence_s > transport.heartbeat_timeout_s:
                raise Rejoin(f"the learner has been silent for {silence_s:.1f} s")
            seen = self.worker.door.look()
            if seen is not None and seen.incarnation != self.welcome.incarnation:
                raise Rejoin(f"the learner lives again, as incarnation {seen.incarnation}")

    async def abandon(self) -> None:
        """Drop leases and staging; finished groups stay in the outbox."""
        if self.scheduler is not None:
            self.scheduler.drop_waiting()
        if self.updates is not None:
            await self.updates.close(self.worker.config.weights.phase_timeout_s)

    async def goodbye(self, reason: str) -> None:
        """Tell the learner why, so that it leases the work to others at once."""
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.link.send(Goodbye(reason=reason))
        except (TimeoutError, TransportError) as e:
            log.warning("the learner could not be told Goodbye: %s", e)
        self.link.close(GOODBYE_S)


class Pulse:
    """The engine core's sign of life: a round trip with every heartbeat, given up after connect_timeout_s."""

    def __init__(self, sampler: Sampler, transport: TransportConfig) -> None:
        self.every_s = transport.heartbeat_s
        self._engine, self._timeout_s = sampler.engine, transport.connect_timeout_s
        self._silent_s = transport.heartbeat_timeout_s
        self._answered_s = time.monotonic()

    @property
    def age_s(self) -> float:
        """Since the engine core last answered; a healthy one stays below every_s and a step."""
        return time.monotonic() - self._answered_s

    def restart(self) -> None:
        """Count the age from now: nobody has asked for a while."""
        self._answered_s = time.monotonic()

    async def check(self) -> None:
        """Returns when the engine answers: a frozen one joins nothing until it wakes. Raises EngineDead after timeout_s.

        It asks again every every_s, for a question that was under way when the core died may never be answered.
        """
        asked: set[asyncio.Task[None]] = set()
        begin, told = time.monotonic(), False
        try:
            with waiting("the engine core to answer"):
                while True:
                    asked.add(asyncio.create_task(self._engine.ping(self._timeout_s), name="ping"))
                    done, _ = await asyncio.wait(asked, timeout=self.every_s, return_when=asyncio.FIRST_COMPLETED)
                    for answered in done:
                        answered.result()
                        self._answered_s = time.monotonic()
                        return
                    if not told and (silent_s := time.monotonic() - begin) > self._silent_s:
                        told = True
                        stacks.dump(f"the engine core has not answered for {silent_s:.1f} s", self._engine.core_pid)
        finally:
            for task in asked:
                task.cancel()

    async def run(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(self.every_s)


def _worst(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What ended a membership, when several things did at once: a bug first, then what is most final."""
    order = (EngineDead, Fatal, Ended, Rejoin)
    found = [Rejoin(str(e)) if isinstance(e, TransportError) else e for e in group.exceptions]
    unforeseen = [e for e in found if not isinstance(e, order)]
    return (unforeseen or sorted(found, key=lambda e: [isinstance(e, kind) for kind in order].index(True)))[0]


def _reason(why: BaseException) -> str:
    return "it was stopped" if isinstance(why, asyncio.CancelledError) else f"{type(why).__name__}: {why}"[:1000]
