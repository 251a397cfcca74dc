"""How a rollout finds its learner: discovery file, connection, Hello, Welcome.

Owns the wait for a learner and its deadline; imports transport. Invariants: the discovery file is read again before every
attempt, and a new life of the learner gets a new connection, so nothing of an old one is ever read; nobody waits for the
learner of a run that has finished meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from async_rl.observability.finished import nobody_left, steps_done
from async_rl.observability.log import get_logger
from async_rl.observability.waiting import waiting
from async_rl.transport.base import Link, TransportError
from async_rl.transport.discovery import Discovery, read_discovery
from async_rl.transport.messages import End, Error, Hello, Welcome

log = get_logger(__name__)


class Fatal(Exception):
    """The learner refuses this process for good; its sentence."""


class Unreachable(Exception):
    """No learner answered in time; one sentence with file and address."""


class Ended(Exception):
    """The run is over; the learner's reason."""


class Rejoin(Exception):
    """This membership is over: drop its work and say Hello again."""


@dataclass(frozen=True)
class Joined:
    link: Link
    welcome: Welcome


@dataclass(frozen=True)
class Door:
    """Where and how to knock. `connect(control_address)` gives a fresh Link."""

    path: Path  # of the discovery file
    hello: Hello
    connect: Callable[[str], Link]
    retry_s: float  # how often the discovery file is looked at
    answer_s: float  # how long one Hello may stay unanswered before it is said over a new connection
    timeout_s: float
    key: str = ""  # where its own lies, if there are keys
    since_s: float = field(default_factory=lambda: psutil.Process().create_time())  # a run that finished earlier may go on

    def look(self) -> Discovery | None:
        """What the file says of this run; None when it is absent or speaks of another run."""
        seen = read_discovery(self.path)
        return seen if seen is not None and seen.run_id == self.hello.run_id else None

    async def join(self) -> Joined:
        """Knock until a Welcome. Raises Fatal, Ended, or Unreachable after timeout_s."""
        log.info("looking for the learner in %s", self.path)
        with waiting("a learner that takes this rollout in", self._where):
            return await self._join()

    def _where(self) -> str:
        seen = self.look()
        if seen is None:
            return f"{self.path} names no learner of this run"
        keyed = f" with {self.key}, which it answers only if it knows that" if self.key else ""
        return f"knocking at {seen.control_address}{keyed}"

    async def _join(self) -> Joined:
        seen: Discovery | None = None
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            if steps := steps_done(self.path.parent, self.since_s):
                raise Ended(nobody_left(self.path.parent, steps))
            seen = self.look()
            if seen is not None:
                joined = await self._knock(seen, deadline)
                if joined is not None:
                    return joined
            await asyncio.sleep(min(self.retry_s, 0.2))
        where = (
            f"at {seen.control_address} (from {self.path})" if seen else f"in {self.path}, which names no learner of this run"
        )
        raise Unreachable(
            f"{self.hello.name} heard nothing from the learner for {self.timeout_s:g} s: looked {where}; check that it runs "
            "and that no firewall is in between, that it knows this rollout's key if there are keys (transport.keys), or raise "
            "transport.connect_timeout_s"
        )

    async def _knock(self, seen: Discovery, deadline: float) -> Joined | None:
        """One Hello over one connection; None when it stays unanswered, is put off, or the file names another learner."""
        link: Link | None = self.connect(seen.control_address)
        answering = asyncio.create_task(self._ask(link))
        try:
            give_up = min(deadline, time.monotonic() + self.answer_s)
            while not answering.done() and time.monotonic() < give_up and self.look() == seen:
                await asyncio.wait([answering], timeout=self.retry_s)
            welcome = answering.result() if answering.done() else None
            if welcome is not None and welcome.incarnation == seen.incarnation:
                link.open_data(welcome.data_address)
                joined, link = Joined(link, welcome), None  # not ours to close any more
                return joined
        except TransportError as e:
            log.warning("cannot reach the learner at %s: %s", seen.control_address, e)
        finally:
            answering.cancel()
            if link is not None:
                link.close(0.0)
        return None

    async def _ask(self, link: Link) -> Welcome | None:
        await link.send(self.hello)
        while True:
            match await link.recv():
                case Welcome() as welcome:
                    return welcome
                case End(reason=reason):
                    raise Ended(reason)
                case Error(code="fatal", text=text):
                    raise Fatal(text)
                case Error(text=text):
                    log.warning("the learner put off the join: %s", text)
                    return None
                case _:  # a heartbeat that crossed our Hello
                    continue
