"""A weight's way in: Prepare, Prepared, Staged, Commit, Committed, as tasks beside the control reader.

Owns the update in progress of one membership; imports weights, transport messages and the Engine protocol. Invariants: at
most one engine call of an update runs at a time; a newer Prepare ends the older update before it starts; a commit is
never cut short (it would leave the engine paused), only bounded; what belongs to another life or membership is logged
and ignored.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from async_rl.observability import stacks
from async_rl.observability.log import get_logger
from async_rl.observability.waiting import waiting
from async_rl.rollout.engine import Engine, EngineDead, InFlight
from async_rl.transport.messages import Commit, Committed, Error, Message, Prepare, Prepared, Staged
from async_rl.types import WeightName
from async_rl.weights.base import WeightsError
from async_rl.weights.group import GroupSpec
from async_rl.weights.manifest import Manifest

log = get_logger(__name__)
Result = TypeVar("Result")
SLOW = 0.9  # of the phase deadline: an engine that fails later than that has run into a deadline of its own
GRACE_S = 2.0  # what an engine may exceed the deadline it was given, before the call is given up from outside


@dataclass
class _Update:
    prepare: Prepare
    bucket_digests: list[str] | None = None  # None until staged
    committing: bool = False

    @property
    def name(self) -> WeightName:
        return WeightName(self.prepare.incarnation, self.prepare.version)

    @property
    def staged(self) -> bool:
        return self.bucket_digests is not None


class Updates:
    """One per membership; its tasks live in the TaskGroup it is given, so EngineDead ends that group."""

    def __init__(
        self,
        engine: Engine,
        say: Callable[[Message], Awaitable[None]],
        in_flight: InFlight,
        incarnation: int,
        tasks: asyncio.TaskGroup,
        counts: Counter[str],
    ) -> None:
        self.phase = ""
        self.counts = counts
        self._engine, self._say = engine, say
        self._in_flight: InFlight = in_flight
        self._incarnation, self._tasks = incarnation, tasks
        self._update: _Update | None = None
        self._spec: GroupSpec | None = None  # of the joined group
        self._task: asyncio.Task[None] | None = None
        self._commit_task: asyncio.Task[str] | None = None  # outside the TaskGroup: it survives a rejoin until it is done

    # ---- messages

    def prepare(self, message: Prepare) -> None:
        """Begin to receive; whatever update was in progress is superseded."""
        current = self._update.prepare.membership if self._update else 0
        if message.incarnation != self._incarnation or message.membership < current:
            self._ignored(message)
            return
        self._replace_task(lambda: self._receive(message))

    def commit(self, message: Commit) -> None:
        """Serve what was staged, if it is what the learner sent."""
        update = self._update
        name = WeightName(message.incarnation, message.version)
        if update is None or not update.staged or (name, message.membership) != (update.name, update.prepare.membership):
            self._ignored(message)
            return
        if update.committing:
            self._ignored(message)
            return
        update.committing = True
        self._replace_task(lambda: self._load(update, message.bucket_digests))

    async def close(self, timeout_s: float) -> None:
        """After the tasks have ended: let a running commit finish, then leave the group; each bounded by timeout_s."""
        if self._commit_task is not None:
            with waiting("the engine to finish the commit that the last membership began"):
                done, _ = await asyncio.wait([self._commit_task], timeout=timeout_s)
            for task in done:
                if isinstance(failure := task.exception(), EngineDead):
                    raise failure
        if self._spec is not None or self._update is not None:
            await self._discard(timeout_s)
        self._update, self._spec, self._commit_task = None, None, None

    async def _discard(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._engine.discard()
        except (TimeoutError, WeightsError) as e:
            log.warning("leaving the weight group failed: %s", str(e) or f"no answer from the engine in {timeout_s:g} s")

    # ---- tasks

    def _replace_task(self, work: Callable[[], Awaitable[None]]) -> None:
        previous = self._task
        if previous is not None and self._commit_task is None:
            previous.cancel()
        self._task = self._tasks.create_task(self._after(previous, work), name="weights")

    async def _after(self, previous: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> None:
        try:
            if previous is not None:
                await asyncio.wait([previous])
            await work()
        except WeightsError as e:
            self.counts["updates_failed"] += 1
            log.warning("weight update failed: %s", e)
            membership = self._update.prepare.membership if self._update else 0
            await self._abandon()
            await self._say(Error(code="weights", text=str(e)[:4000], membership=membership))
        finally:
            self.phase = ""

    async def _abandon(self) -> None:
        self._update, self._spec = None, None
        await self._discard(GRACE_S)

    async def _receive(self, message: Prepare) -> None:
        if self._update is not None and not self._update.staged:
            self.counts["updates_superseded"] += 1
            await self._abandon()
        update = self._update = _Update(message)
        manifest = Manifest.from_dict(message.manifest)
        spec = self._joined_or_new(message)
        self._in_phase("preparing", update.name)
        await self._bounded(self._engine.prepare(spec, manifest, message.timeout_s), "prepare", message, message.timeout_s)
        self._spec = spec
        await self._say(Prepared(membership=message.membership, version=message.version))
        self._in_phase("receiving", update.name)
        # each bucket is bounded by the group's own timeout; the learner sends them at its micro-batch boundaries
        limit_s = message.timeout_s * (1 + len(manifest.buckets))
        digests = await self._bounded(self._engine.staged(limit_s), "receive", message, limit_s)
        update.bucket_digests = digests
        await self._say(Staged(membership=message.membership, version=message.version))

    def _joined_or_new(self, message: Prepare) -> GroupSpec:
        """A Prepare for the membership already joined names no address: its group goes on."""
        joined = self._spec
        if joined is not None and (joined.membership, joined.tag) == (message.membership, message.tag):
            return joined
        return GroupSpec(
            backend=message.backend,
            host=message.host,
            port=message.port,
            tag=message.tag,
            rank=message.rank,
            world_size=message.world_size,
            membership=message.membership,
            timeout_s=message.timeout_s,
        )

    async def _load(self, update: _Update, sent: list[str]) -> None:
        prepare = update.prepare
        arrived = update.bucket_digests or []
        wrong = [k for k, (a, b) in enumerate(zip(arrived, sent, strict=False)) if a != b]
        if wrong or len(arrived) != len(sent):
            raise WeightsError(
                f"weights {update.name} are damaged: {len(arrived)} of {len(sent)} buckets, {len(wrong)} with another digest"
            )
        self._in_phase("committing", update.name)
        call = self._engine.commit(update.name, self._in_flight, prepare.timeout_s)
        self._commit_task = asyncio.create_task(self._bounded(call, "commit", prepare, prepare.timeout_s), name="commit")
        try:
            checksum = await asyncio.shield(self._commit_task)
        finally:
            if self._commit_task.done():
                self._commit_task = None
        self.counts["updates_committed"] += 1
        await self._say(Committed(membership=prepare.membership, version=prepare.version, checksum=checksum))

    def _in_phase(self, phase: str, name: WeightName) -> None:
        self.phase = f"{phase} {name}"
        log.debug("%s", self.phase)

    async def _bounded(self, call: Awaitable[Result], phase: str, message: Prepare, timeout_s: float) -> Result:
        name = f"{message.incarnation}:{message.version} of membership {message.membership}"
        begin = time.monotonic()
        try:
            with waiting(f"the engine to {phase} {name}"):
                async with asyncio.timeout(timeout_s + GRACE_S):
                    return await call
        except TimeoutError:
            stacks.dump(f"the engine did not finish to {phase} {name}", self._engine.core_pid)
            raise WeightsError(f"the engine did not finish to {phase} {name} within {timeout_s:g} s") from None
        except WeightsError as e:
            if time.monotonic() - begin > SLOW * message.timeout_s:  # a deadline within the engine has passed
                stacks.dump(f"{phase} {name}: {e}", self._engine.core_pid)
            raise

    def _ignored(self, message: Prepare | Commit) -> None:
        self.counts["updates_ignored"] += 1
        log.info(
            "ignored %s of %d:%d, membership %d: not the current one",
            message.kind,
            message.incarnation,
            message.version,
            message.membership,
        )
