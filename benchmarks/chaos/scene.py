"""The run that faults are played upon: its launcher, the rollouts that an operator keeps alive, and what is seen of it.

Owns the processes that it starts and the samples of the run's progress. Invariant: it looks at the run as a person could, by
its terminal and the files of its folder, and never talks to it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from async_rl.observability.sinks import METRICS, TIMING
from async_rl.transport.keys import make_keys
from benchmarks.chaos.hosts import Host, small_disk
from benchmarks.chaos.reward import MODE_FILE

ROOT = Path(__file__).parents[2]
LOOK_S = 0.2
START_S = 600.0  # of a learner whose model has yet to be made
TAIL_BYTES = 16 << 10
DISK_BYTES = 64 << 20
TOYS = ("toy-1", "toy-2")
# Their answers are noise, worth nothing, so that their groups have no variance: they cost the run time and teach it nothing.
TOY = {"ASYNC_RL_ENGINE": "toy", "ASYNC_RL_TOY": json.dumps({"token_delay_s": 0.1})}
SPOKEN = re.compile(r"waiting|starting it again|resumed|expelled|left|evaluates|joined|has not ended|killed by")
STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)\.(\d{3}) ")


class Seen(NamedTuple):
    """A step, as its rows came to light."""

    time_s: float
    incarnation: int
    version: int
    num_live: int


@dataclass
class Operator:
    """Starts a rollout again whenever it fails, as a service manager would."""

    name: str
    host: Host
    run_dir: Path
    popen: subprocess.Popen[bytes]
    starts: int = 1


@dataclass
class Scene:
    run_dir: Path
    overrides: list[str]
    hosts: list[Host]
    seen: list[Seen] = field(default_factory=list)
    said: list[tuple[float, str]] = field(default_factory=list)  # lines of the terminal, and when

    def __post_init__(self) -> None:
        self.output = self.run_dir.with_suffix(".txt")
        self.mode_file = self.run_dir.with_suffix(".mode")
        self._operators: list[Operator] = []
        self._read = 0
        self._closing = threading.Event()
        self._lock = threading.RLock()
        self._env = {**os.environ, MODE_FILE: str(self.mode_file)}
        self.keys = self.run_dir.with_suffix(".keys")
        make_keys(self.keys)
        small_disk(self.run_dir / "checkpoints", DISK_BYTES)

    # ---- processes

    def start(self, num_steps: int) -> None:
        """`async-rl train`, then the two rollouts by hand."""
        places = (f"run_dir={self.run_dir}", f"transport.keys={self.keys}")
        argv = [sys.executable, "-m", "async_rl", "train", "configs/quickstart.yaml", *places]
        with self.output.open("ab") as file:
            self.train = subprocess.Popen(
                [*argv, f"num_steps={num_steps}", *self.overrides],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        self.wait("the learner", (self.run_dir / "learner.json").exists, START_S)
        self._closing.clear()
        with self._lock:
            self._operators = [
                Operator(name, host, self.run_dir, self._start_toy(name, host))
                for name, host in zip(TOYS, self.hosts, strict=True)
            ]
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _start_toy(self, name: str, host: Host) -> subprocess.Popen[bytes]:
        log = self.run_dir / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = [*host.enter, sys.executable, "-m", "async_rl.rollout", str(self.run_dir), "--name", name]
        with log.open("ab") as file:
            return subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=file, env=self._env | TOY, start_new_session=True)

    def finish(self, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Exit code of the launcher, which ends or is made to, and the JSON of its last line."""
        code = self.train.wait(timeout_s)
        self._closing.set()
        self._thread.join()
        self._listen()
        return code, json.loads(self.said[-1][1])

    def toy(self, number: int) -> int:
        with self._lock:
            return self._operators[number].popen.pid

    def pids(self, *words: str) -> list[int]:
        """Living processes of the run whose command line holds all of `words` and the run's folder."""
        return [p.pid for p in _processes() if all(word in " ".join(_cmdline(p)) for word in (str(self.run_dir), *words))]

    def ranks(self) -> list[int]:
        """Of the learner, in their order."""
        torchrun = self.torchrun()
        found = [psutil.Process(pid) for pid in self.pids("async_rl.learner") if pid != torchrun]
        return [p.pid for p in sorted(found, key=lambda p: int(p.environ().get("RANK", "0")))]

    def torchrun(self) -> int:
        (pid,) = self.pids("async_rl.learner.torchrun")
        return pid

    def vllm(self) -> int:
        (pid,) = self.pids("async_rl.rollout", "rollout-0")
        return pid

    def core(self) -> int:
        """The engine's, a child of the rollout that has vLLM."""
        cores = [
            p for p in psutil.Process(self.vllm()).children() if "EngineCore" in p.name() or "EngineCore" in str(_cmdline(p))
        ]
        return cores[0].pid

    def strangers(self) -> list[str]:
        """Command lines of all that lives in these namespaces beside the benchmark itself."""
        own = {os.getpid(), *(host.holder for host in self.hosts)}
        return [" ".join(_cmdline(p)) for p in _processes() if p.pid not in own]

    # ---- what is seen

    def wait(self, what: str, ready: Callable[[], Any], timeout_s: float) -> bool:
        """Whether it came in time; raises when the run ends meanwhile."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if ready():
                return True
            if self.train.poll() is not None:
                raise RuntimeError(f"the run ended with {self.train.poll()} while {what} was awaited")
            time.sleep(LOOK_S)
        return False

    @property
    def version(self) -> int:
        return self.seen[-1].version if self.seen else 0

    @property
    def incarnation(self) -> int:
        return self.seen[-1].incarnation if self.seen else 0

    def since(self, time_s: float) -> list[Seen]:
        return [seen for seen in self.seen if seen.time_s > time_s]

    def saved(self) -> str:
        try:
            return (self.run_dir / "checkpoints" / "latest").read_text().strip()
        except OSError:
            return ""

    def text(self) -> str:
        return "\n".join(line for _, line in self.said)

    def spoke(self, begin_s: float, end_s: float) -> bool:
        """Whether the run said, on its terminal or in rank 0's log, what it waits for or what has happened to it."""
        told = [(at, line) for at, line in [*self.said, *self._logged()] if SPOKEN.search(line)]
        return any(begin_s < at <= end_s + 1.0 for at, _ in told)

    def _logged(self) -> list[tuple[float, str]]:
        lines = []
        for line in (self.run_dir / "logs" / "learner-0.log").read_text(errors="replace").splitlines():
            if found := STAMP.match(line):
                at = time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S")) + int(found[2]) / 1000
                lines.append((at, line))
        return lines

    def _look(self) -> None:
        while not self._closing.is_set():
            self._listen()
            row, clock = _last_step(self.run_dir / METRICS), _last_step(self.run_dir / TIMING)
            if row and clock and row["step"] == clock["step"]:
                found = (row["incarnation"], row["version"], int(clock["rollout/num_live"]))
                if not self.seen or self.seen[-1][1:3] != found[:2]:
                    self.seen.append(Seen(time.time(), *found))
            for operator in self._operators:
                with self._lock:
                    if operator.popen.poll():
                        operator.popen, operator.starts = self._start_toy(operator.name, operator.host), operator.starts + 1
            self._closing.wait(LOOK_S)

    def _listen(self) -> None:
        text = self.output.read_bytes()[self._read :].rpartition(b"\n")[0]
        if text:
            self._read += len(text) + 1
            self.said += [(time.time(), line) for line in text.decode(errors="replace").splitlines()]


def stop(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def go_on(pids: list[int]) -> None:
    """Those that live yet."""
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


def kill(pids: list[int]) -> None:
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def _processes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _last_step(path: Path) -> dict[str, Any]:
    """The last row of a step in a file that is being written, or cut back, at the moment."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "reward/mean" in row or row.get("of") == "step":
            return row
    return {}
