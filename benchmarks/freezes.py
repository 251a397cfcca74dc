"""What a frozen member costs: SIGSTOP of one of three rollouts in each phase of a weight update, and SIGCONT when the others
have gone on.

One run of the random tiny policy with one real vLLM and two toy engines; `--toy` leaves vLLM out. Of vLLM the rollout process
and its engine core are frozen apart, in SEND and in COMMIT. A case counts when the member was caught in the phase: the
update that it was in was completed without it. Prints one JSON line for each:

    published_after_s   from SIGSTOP to the end of that update on the others, at most `bound_s` = weights.phase_timeout_s + 5
    named               the learner's sentence about the member
    back_after_s        from SIGCONT to its first update; the learner has compared the checksum of what it holds by then
    versions            of the update it was frozen in, and of the one it came back with
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
PHASE_TIMEOUT_S, ALLOWANCE_S = 10.0, 5.0
START_S, UPDATE_S = 600.0, 120.0
MAX_BORDERLINE = 2  # tries that may catch a member at the border of the phase
MAX_TRIES = 30  # updates in which a member may get through its phase before it is stopped
PHASES = {"PREPARE": "preparing", "SEND": "receiving", "COMMIT": "committing"}
SCRIPT = {"token_delay_s": 0.01, "frozen": ["prepare", "commit"], "frozen_s": 0.5}
SETTINGS = (
    "model.make=null", "groups_per_step=4", "rollout.num_slots=4", "eval.draws=0", "checkpoint.every=0", "num_steps=100000",
    "observe.log_level=debug", "weights.bucket_bytes=16384", f"weights.phase_timeout_s={PHASE_TIMEOUT_S:g}",
    "transport.heartbeat_s=0.5", "rollout.start_timeout_s=600", "rollout.timeout_s=400",
)  # fmt: skip


class Tail:
    """The lines that are added to a file from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = path.stat().st_size if path.exists() else 0
        self._rest = ""

    @classmethod
    def whole(cls, path: Path) -> Tail:
        """With what is in it already."""
        tail = cls(path)
        tail._at = 0
        return tail

    def lines(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
            self._at += len(data)
            *whole, self._rest = (self._rest + data.decode(errors="replace")).split("\n")
            return whole
        return []

    def find(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """The first line that it matches; raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for line in self.lines():
                if match := re.search(pattern, line):
                    return match
            time.sleep(0.0005)
        raise TimeoutError(f"{self.path} said nothing like '{pattern}' in {timeout_s:g} s")


@dataclass
class Scene:
    """A run whose rollouts can be caught in a phase."""

    run_dir: Path
    popen: subprocess.Popen[bytes]
    outputs: dict[str, Path]  # of each rollout by name
    popens: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)  # of those started by hand

    @property
    def learner_log(self) -> Path:
        return self.run_dir / "logs" / "learner-0.log"

    def pid(self, name: str, core: bool = False) -> int:
        """Of the rollout, or of its engine core."""
        word = json.loads((self.run_dir / "status" / f"{name}.json").read_text())
        return word["core" if core else "pid"]

    def start(self, name: str) -> None:
        """A rollout with the toy engine, whatever the run's own is."""
        output = self.outputs[name] = self.run_dir.parent / f"{name}.{time.monotonic_ns()}.txt"
        env = os.environ | {"ASYNC_RL_ENGINE": "toy", "ASYNC_RL_TOY": json.dumps(SCRIPT), "PYTHONPATH": str(ROOT)}
        argv = [sys.executable, "-m", "async_rl", "rollout", str(self.run_dir), "--name", name]
        with output.open("wb") as file:
            self.popens[name] = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)

    def at_phase(self, name: str, phase: str) -> int:
        """Wait until this rollout says that it begins the phase; of which version."""
        word = PHASES[phase]
        return int(Tail(self.outputs[name]).find(rf"DEBUG .*: {word} \d+:(\d+)$", UPDATE_S).group(1))

    def published(self, tail: Tail, members: set[str], timeout_s: float = UPDATE_S) -> int:
        """Wait until all of them, by name, have committed one version together."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = tail.find(r"published \d+:(\d+) to (.*)$", deadline - time.monotonic())
            if members <= {i.partition("#")[0] for i in found.group(2).split(", ")}:
                return int(found.group(1))

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While the block runs nobody new finds the learner."""
        there, away = self.run_dir / "learner.json", self.run_dir / "learner.hidden"
        there.rename(away)
        try:
            yield
        finally:
            away.rename(there)


@contextmanager
def scene(
    folder: Path, *settings: str, own: tuple[str, ...] = ("rollout-0",), by_hand: tuple[str, ...] = ()
) -> Iterator[Scene]:
    """A run with the rollouts `own`, which `train` starts, and those started by hand, once all of them serve."""
    model, run_dir = folder / "model", folder / "run"
    if not model.exists():
        _random_model(model)
    argv = [sys.executable, "-m", "async_rl", "train", "configs/quickstart.yaml", f"run_dir={run_dir}", f"model.path={model}"]
    argv += [*SETTINGS, f"rollout.count={len(own)}", *settings]
    env = os.environ | {"ASYNC_RL_TOY": json.dumps(SCRIPT), "PYTHONPATH": str(ROOT)}
    with (folder / "output.txt").open("wb") as file:
        popen = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)
    found = Scene(run_dir, popen, {name: run_dir / "logs" / f"{name}.log" for name in own})
    try:
        until((run_dir / "run.json").exists, 60)
        for name in by_hand:
            found.start(name)
        found.published(Tail(found.learner_log), {*own, *by_hand}, START_S)
        yield found
    finally:
        for started in (popen, *found.popens.values()):
            if started.poll() is None:
                started.send_signal(signal.SIGINT)
        for started in (popen, *found.popens.values()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


def until(ready: Callable[[], T], timeout_s: float) -> T:
    """The first true result; raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not (result := ready()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.05)
    return result


def freeze(found: Scene, name: str, phase: str, core: bool = False) -> dict[str, Any]:
    """Catch the member in the phase of an update, and let it go when the others have gone on."""
    others = set(found.outputs) - {name}
    for tries in range(1, MAX_TRIES + 1):
        pid, learner = found.pid(name, core), Tail(found.learner_log)
        version = found.at_phase(name, phase)
        os.kill(pid, signal.SIGSTOP)
        frozen_s = time.monotonic()
        try:
            lines = _until_published(learner, version)
            after_s = time.monotonic() - frozen_s
        finally:
            back = Tail(found.learner_log)
            os.kill(pid, signal.SIGCONT)
        going_s = time.monotonic()
        served = lines[-1].rpartition(" to ")[2]
        if f"{name}#" in served or not all(f"{other}#" in served for other in others):
            continue  # it got through before it was stopped
        sentences = (re.search(rf"{name}#\d+ expelled: .*", line) for line in lines)
        named = next((said.group() for said in sentences if said), "")
        version_back = found.published(back, {name, *others})
        if phase not in named and tries <= MAX_BORDERLINE:
            continue  # it was stopped before its word of the phase before had left it
        back_s = time.monotonic() - going_s
        later = found.published(Tail(found.learner_log), {name, *others})
        return {
            "member": name, "process": "engine core" if core else "rollout", "phase": phase, "tries": tries,
            "published_after_s": round(after_s, 2), "bound_s": PHASE_TIMEOUT_S + ALLOWANCE_S,
            "named": named,
            "back_after_s": round(back_s, 2), "versions": [version, version_back], "trained_on": later > version_back,
        }  # fmt: skip
    raise TimeoutError(f"{name} was never caught in {phase}")


def _until_published(learner: Tail, version: int) -> list[str]:
    """The learner's lines up to the one that says that this version is published."""
    lines: list[str] = []
    deadline = time.monotonic() + UPDATE_S
    while time.monotonic() < deadline:
        for line in learner.lines():
            lines.append(line)
            if re.search(rf"published \d+:{version} to ", line):
                return lines
        time.sleep(0.002)
    raise TimeoutError(f"version {version} was not published in {UPDATE_S:g} s")


def _random_model(folder: Path) -> None:
    from async_rl.recipes.tiny import new_model
    from async_rl.recipes.tokenizer import character_tokenizer

    new_model(0).save_pretrained(folder)
    character_tokenizer(64).save_pretrained(folder)


def main(argv: list[str]) -> int:
    from benchmarks.algorithms import commit, machine
    from benchmarks.whole_runs import end_in_order

    parser = argparse.ArgumentParser(prog="python -m benchmarks.freezes", description="What a frozen member costs.")
    parser.add_argument("--toy", action="store_true", help="three toy engines, no vLLM")
    toy = parser.parse_args(argv).toy
    end_in_order()
    engine = "rollout.engine=toy" if toy else "rollout.engine=vllm"
    cases: list[tuple[str, str, bool]] = [("toy-0", phase, False) for phase in PHASES]
    if not toy:
        cases += [("rollout-0", phase, core) for core in (False, True) for phase in ("SEND", "COMMIT")]
    late = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="freezes-")))
        found = stack.enter_context(scene(folder, engine, by_hand=("toy-0", "toy-1")))
        for name, phase, core in cases:
            try:
                case = freeze(found, name, phase, core)
            except TimeoutError as e:
                case = {"member": name, "process": "engine core" if core else "rollout", "phase": phase, "failed": str(e)}
            late += "failed" in case or case["published_after_s"] > case["bound_s"] or not case["named"]
            print(json.dumps(case | {"machine": machine(), "commit": commit()}), flush=True)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
