"""Whole runs for benchmarks: started in process groups of their own, killed, and read back.

The toy engine, a model with random weights and a reward by the answer's digest: everything but learning is that of a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from async_rl.observability.sinks import read_rows
from async_rl.recipes.tiny import new_model
from async_rl.recipes.tokenizer import character_tokenizer

ROOT = Path(__file__).parents[1]
SCRIPT = {"first_token": 10, "num_tokens": 40}  # ids that are text
POLL_S = 0.02
START_TIMEOUT_S = 300.0


def by_answer(prompt: str, answer: str, **_: Any) -> float:
    """A reward that no answer earns by merit, and that differs between answers."""
    return hashlib.sha256(answer.encode()).digest()[0] / 255


def make_model(folder: Path) -> str:
    """The tiny policy's architecture with random weights, as an override."""
    new_model(0).save_pretrained(folder)
    character_tokenizer(64).save_pretrained(folder)
    return f"model.path={folder}"


def toy(folder: Path, *overrides: str) -> list[str]:
    """`train` on the toy engine, its model made in `folder` if need be."""
    path = folder / "model"
    model = f"model.path={path}" if path.exists() else make_model(path)
    reward = "data.reward=benchmarks.whole_runs:by_answer"
    own = ("rollout.engine=toy", "model.make=null", model, reward, "groups_per_step=4", "rollout.num_slots=4", "eval.draws=0")
    return ["train", str(ROOT / "configs" / "quickstart.yaml"), *own, *overrides]


class Command:
    """`async-rl ARGUMENTS` in a process group of its own; `run_dir` is in its processes' command lines."""

    def __init__(self, run_dir: Path, arguments: list[str], **script: Any) -> None:
        self.run_dir, self.output = run_dir, run_dir.with_name(f"{run_dir.name}.{time.monotonic_ns()}.txt")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "ASYNC_RL_TOY": json.dumps(SCRIPT | script)}
        with self.output.open("w") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "async_rl", *arguments],
                cwd=ROOT,
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait(10)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def finish(self, timeout_s: float, code: int = 0) -> dict[str, Any]:
        """The JSON of the last line."""
        found = self.popen.wait(timeout_s)
        text = self.output.read_text()
        assert found == code, f"exit code {found} instead of {code}:\n{text}"
        return json.loads(text.splitlines()[-1])

    def wait_until(self, what: str, ready: Callable[[], Any], timeout_s: float = START_TIMEOUT_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if result := ready():
                return result
            assert self.popen.poll() is None, f"it ended while waiting for {what}:\n{self.output.read_text()}"
            time.sleep(POLL_S)
        raise AssertionError(f"no {what} within {timeout_s} s:\n{self.output.read_text()}")

    def pids(self, *words: str) -> list[int]:
        return pids(self.run_dir, *words)

    def ranks(self) -> list[int]:
        """Of the learner, without its torchrun."""
        return sorted(set(self.pids("async_rl.learner")) - set(self.pids("async_rl.learner.torchrun")))


def pids(run_dir: Path, *words: str) -> list[int]:
    """Processes whose command line holds all of `words` and the run's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if f"{run_dir} " in line and all(word in line for word in words):
                    found.append(int(entry.name))
    return sorted(found)


def kill(pids: list[int], number: int = signal.SIGKILL) -> int:
    """How many there were to be killed."""
    count = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            count += 1
    return count


def newest(run_dir: Path) -> int:
    """The version that `checkpoints/latest` names; -1 without one."""
    try:
        return int((run_dir / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))
    except (OSError, ValueError):
        return -1


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(run_dir / "metrics.jsonl") if "reward/mean" in row]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds, whole, whatever the number of ranks that wrote it."""
    reader = FileSystemReader(checkpoint)
    held = reader.read_metadata().state_dict_metadata
    empty = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in held.items()
        if isinstance(each, TensorStorageMetadata)
    }
    load(empty, storage_reader=reader, no_dist=True)
    return empty


def end_in_order() -> None:
    """SIGTERM ends what was started, too, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def whereabouts() -> dict[str, Any]:
    """Machine and commit."""
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False)
    cores = len(os.sched_getaffinity(0))
    return {"machine": f"{platform.machine()}, {cores} cores, torch {torch.__version__}", "commit": said.stdout.strip()}
