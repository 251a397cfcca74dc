"""Whole runs for tests: `async-rl train` in a process group of its own, its metrics and its result read back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.observability.sinks import read_run
from async_rl.recipes.tiny import new_model
from async_rl.recipes.tokenizer import character_tokenizer
from benchmarks import whole_runs

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def random_model(folder: Path) -> Path:
    """The tiny policy's architecture and tokenizer with random weights: enough for whatever does not have to learn."""
    new_model(0).save_pretrained(folder)
    character_tokenizer(64).save_pretrained(folder)
    return folder


@dataclass
class Run:
    popen: subprocess.Popen[str]
    run_dir: Path
    output: Path

    def rows(self) -> list[dict[str, Any]]:
        return read_run(self.run_dir)

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.rows() if "reward/mean" in row]

    def text(self) -> str:
        return self.output.read_text()

    def wait_until(self, what: str, ready: Callable[[], Any], timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if result := ready():
                return result
            assert self.popen.poll() is None, f"the run ended while waiting for {what}:\n{self.text()}"
            time.sleep(0.1)
        raise AssertionError(f"no {what} within {timeout_s} s:\n{self.text()}")

    def finish(self, timeout_s: float) -> dict[str, Any]:
        """Wait for exit code 0; the JSON of the last line."""
        code = self.popen.wait(timeout_s)
        assert code == 0, f"exit code {code}:\n{self.text()}"
        return json.loads(self.text().splitlines()[-1])

    def pids(self, *words: str) -> list[int]:
        """Of this run's processes whose command line holds all of `words`."""
        return whole_runs.pids(self.run_dir, *words)


@contextmanager
def train(
    tmp_path: Path,
    *overrides: str,
    config: Path = QUICKSTART,
    cwd: Path = ROOT,
    python_path: Path | None = None,
    through: tuple[str, ...] = (),
) -> Iterator[Run]:
    """A run with `overrides`, killed with all its children at the end of the block if it still lives. `python_path`: a folder
    whose modules, a `sitecustomize` among them, all its processes find first. `through`: a command that becomes the run."""
    run_dir, output = tmp_path / "run", tmp_path / "output.txt"
    argv = [*through, sys.executable, "-m", "async_rl", "train", str(config), f"run_dir={run_dir}", *overrides]
    with output.open("w") as file:
        popen = subprocess.Popen(
            argv,
            cwd=cwd,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (python_path, ROOT) if python_path else (ROOT,)))},
        )
    run = Run(popen, run_dir, output)
    try:
        yield run
    finally:
        if popen.poll() is None:
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait(10)
        for pid in run.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass
class ByHand:
    """A rollout that a person started for a run, with its own script for the toy engine."""

    popen: subprocess.Popen[str]
    output: Path

    def finish(self, timeout_s: float) -> int:
        return self.popen.wait(timeout_s)

    def counted(self) -> dict[str, int]:
        """What it says at its end that it did."""
        return json.loads(self.output.read_text().rpartition("counted: ")[2].splitlines()[0])


@contextmanager
def rollout(run: Run, name: str, **script: Any) -> Iterator[ByHand]:
    """`async-rl rollout` for the run, once its folder is there; killed at the end of the block if it still lives."""
    run.wait_until("its folder", (run.run_dir / "run.json").exists, 60)
    output = run.output.with_name(f"{name}.{time.monotonic_ns()}.txt")
    argv = [sys.executable, "-m", "async_rl", "rollout", str(run.run_dir), "--name", name]
    env = {**os.environ, "ASYNC_RL_TOY": json.dumps(script)}
    with output.open("w") as file:
        popen = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=file, text=True, start_new_session=True, env=env)
    try:
        yield ByHand(popen, output)
    finally:
        if popen.poll() is None:
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait(10)


def assert_books_balance(result: dict[str, Any], *, trained: int) -> None:
    groups = result["ledger"]["groups"]
    assert result["ledger"]["balanced"]
    assert groups["trained"] == trained
    assert groups["waiting"] == groups["leased"] == groups["ready"] == groups["taken"] == 0
    assert groups["granted"] == groups["trained"] + sum(groups["dropped"].values())
