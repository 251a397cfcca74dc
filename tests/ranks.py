"""Several learner ranks for a test: one process that forks them, and what each of them found."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).parents[1]


class Found(NamedTuple):
    """What each rank found, and the folder they worked in."""

    ranks: list[dict[str, Any]]
    folder: Path


def run_ranks(module: str, num_ranks: int, folder: Path, *other: str) -> Found:
    """`python -m MODULE NUM_RANKS FOLDER [OTHER]`, which calls `fork_ranks`; each rank leaves `rankN.pt` in the folder."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", module, str(num_ranks), str(folder), *other]
    log = folder / "log"
    with log.open("w") as file:
        running = subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
    try:
        code = running.wait(timeout=400)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    assert code == 0, log.read_text()[-5000:]
    return Found([torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(num_ranks)], folder)


def fork_ranks(work: Callable[[int, int, Path, Path | None], None], num_ranks: str, folder: str, other: str = "") -> int:
    """Ranks are forks: what takes seconds is imported once. The exit code is 0 when every rank's is."""
    fork = multiprocessing.get_context("fork")
    arguments = [(int(num_ranks), rank, Path(folder), Path(other) if other else None) for rank in range(int(num_ranks))]
    ranks = [fork.Process(target=work, args=each, daemon=True) for each in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return int(any(process.exitcode for process in ranks))
