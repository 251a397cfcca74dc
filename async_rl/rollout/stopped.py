"""SIGTERM and SIGINT in the processes of this floor, from their first line to their last.

Imports nothing that takes time, for it comes before the imports that do. Invariant: a signal ends the process with 128 + its
number, and with no traceback; once there is something to clean up, it is cleaned up first.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(BaseException):
    """A signal, once there is something to clean up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def code(self) -> int:
        return 128 + self.number

    @property
    def sentence(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"


def hold_back() -> None:
    """Before this process is replaced by one that calls `leave_at_once`: until then no handler is there but Python's own."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def leave_at_once() -> None:
    """While nothing is there to clean up: modules are being imported. Takes what was held back."""
    for number in SIGNALS:
        signal.signal(number, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def raise_stopped() -> None:
    """From now on a signal raises Stopped in the main thread."""
    for number in SIGNALS:
        signal.signal(number, _raise)


@contextmanager
def leaving(clean_up: Callable[[], None]) -> Iterator[None]:
    """Within it a signal cleans up and ends the process there and then: vLLM, while it starts, swallows exceptions."""

    def leave(number: int, frame: FrameType | None) -> None:
        clean_up()
        os._exit(128 + number)

    before = {number: signal.signal(number, leave) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def until_stopped(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; the first signal cancels it, and is raised as Stopped when it has cleaned up. Later ones are ignored."""
    received: list[int] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            task.cancel()

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        if _raised:
            stop(_raised[0])
        return await work
    except asyncio.CancelledError:
        if not received:
            raise
        raise Stopped(received[0]) from None


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


_raised: list[int] = []  # an exception out of nowhere may be swallowed by whatever runs then: it is raised again later


def _raise(number: int, frame: FrameType | None) -> None:
    _raised.append(number)
    raise Stopped(number)
