"""Reward functions, most of which misbehave; the pool imports them by name in its own processes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np


def returns(prompt: str, answer: str, *, value: Any, **_: Any) -> Any:
    return value


def returns_numpy(prompt: str, answer: str, **_: Any) -> Any:
    return np.float32(0.25)


async def waits(prompt: str, answer: str, *, value: float, **_: Any) -> float:
    return value


def hangs_if_asked(prompt: str, answer: str, **_: Any) -> float:
    while answer == "hang":
        time.sleep(0.01)
    return 1.0


def raises(prompt: str, answer: str, **_: Any) -> float:
    raise ValueError("no such\nplanet")


async def raises_by_answer(prompt: str, answer: str, **_: Any) -> float:
    return 1.0 if answer == "ok" else parses(answer) if answer else {}[answer]


def parses(text: str) -> float:
    return json.loads(text)["score"]


def exits(prompt: str, answer: str, **_: Any) -> float:
    if answer == "exit":
        os._exit(7)
    return 1.0


def ends_with(prompt: str, answer: str, **_: Any) -> float:
    """Raises what is not even an Exception, by name."""
    raise {"exit": SystemExit(0), "stop": KeyboardInterrupt(), "cancel": asyncio.CancelledError(), "base": BaseException("x")}[
        answer
    ]


def pid(prompt: str, answer: str, **_: Any) -> int:
    return os.getpid()


def fingerprint(prompt: str, answer: str, **_: Any) -> float:
    """Another number in [0, 1) for each answer: two evaluations agree only if all their answers do."""
    return int(hashlib.md5(f"{prompt}{answer}".encode()).hexdigest(), 16) % 1000 / 1000


def starts_a_program(prompt: str, answer: str, **_: Any) -> float:
    """The usual shape of a reward that runs an answer: `answer` names a file that a program keeps fresh, and what follows."""
    path, then = answer.split(maxsplit=1)
    keep_fresh = f"pathlib.Path({path!r} + '.new').write_text(str(os.getpid())); os.replace({path!r} + '.new', {path!r})"
    loop = f"import os, pathlib, time\nwhile True: {keep_fresh}; time.sleep(0.05)"  # replaced, so that nobody reads half of it
    program = subprocess.Popen([sys.executable, "-c", loop])
    while not os.path.exists(path):
        time.sleep(0.02)
    print("noise", flush=True)
    if then.endswith("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if then.startswith("wait"):
        program.wait()
    if then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def parity(prompt: str, answer: str, **_: Any) -> float:
    """1 for about half of all answers, whatever they say."""
    return float(hashlib.sha256((prompt + answer).encode()).digest()[0] % 2)


def eats(prompt: str, answer: str, **_: Any) -> float:
    """As much memory as the answer says, in Python's own objects or in one array; or how large a core may be."""
    kind, size = answer.split(" ") if " " in answer else (answer, "0")
    if kind == "list":
        KEPT.extend(bytes(1 << 20) for _ in range(int(size) >> 20))
    if kind == "array":
        KEPT.append(np.ones(int(size), np.uint8))
    if kind == "core":
        return max(resource.getrlimit(resource.RLIMIT_CORE))
    return 1.0


KEPT: list[Any] = []
