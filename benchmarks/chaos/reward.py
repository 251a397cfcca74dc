"""The quickstart's reward, which misbehaves with one answer in three while a file says how."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path
from typing import Any

from async_rl.envs.rewards import exact_last_field

MODE_FILE = "ASYNC_RL_CHAOS_REWARD"


def score(prompt: str, answer: str, *, target: str | int, **fields: Any) -> float:
    """1.0 for the right sum at the end of the answer."""
    mode = _mode()
    if mode and zlib.crc32(f"{prompt}{answer}{time.time_ns()}".encode()) % 3 == 0:
        if mode == "slow":
            time.sleep(60)
        elif mode == "exit":
            os._exit(7)
        raise RuntimeError("a reward that raises, as the schedule says")
    return exact_last_field(prompt, answer, target=target, **fields)


def _mode() -> str:
    try:
        return Path(os.environ[MODE_FILE]).read_text()
    except FileNotFoundError:
        return ""
