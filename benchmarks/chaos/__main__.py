"""`python -m benchmarks.chaos --seed 1 --faults 60`: a run under faults, beside the same run without; prints one JSON line.

Two learner ranks and three rollouts, one with vLLM on the learner's host and two toys on hosts of their own; each host is a
namespace. A fault has been survived when, once it is over, the run has made two more versions with all three rollouts
serving, and whatever its kind asks for beside. In the end the run is stopped by SIGTERM, continued, and finished; then its
books and processes are looked at. About half a minute per fault on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.chaos.faults import schedule
from benchmarks.chaos.hosts import LEARNER, Host, enter
from benchmarks.chaos.scene import ROOT, Scene
from benchmarks.chaos.verdict import curve, score, verdict

RECOVERY_S = 180.0  # longest from the end of a fault to the run as it was
QUIET_STEPS = 2
STALL_S = 15.0  # without a new version; a longer one must be explained by a line, which waits give every 10 s
NO_END = 1_000_000
MORE_STEPS = 5
NUM_DRAWS = 512
GRACE_S = 10.0  # for processes to be gone
OVERRIDES = (
    f"transport.host={LEARNER}",
    "record=true",
    "transport.heartbeat_s=0.5",
    "transport.heartbeat_timeout_s=5",
    "transport.connect_timeout_s=300",
    "weights.phase_timeout_s=10",
    "rollout.count=1",
    "rollout.lease_timeout_s=30",
    "rollout.reward_timeout_s=2",
    "rollout.timeout_s=300",
    "learner.ranks=2",
    "learner.step_timeout_s=60",
    "learner.warmup_fraction=0",
    "learner.min_lr_ratio=1",
    "checkpoint.every=5",
    "data.reward=benchmarks.chaos.reward:score",
    "eval.every=40",
    "eval.draws=64",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description="A run under faults.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument(
        "--kinds", default=[], type=lambda text: text.split(","), help="only these, for example kill_rollout,garbage"
    )
    parser.add_argument("--compare", type=int, default=160, metavar="STEPS", help="of the run without faults, 0 for none")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for the runs, to look into afterwards")
    arguments = parser.parse_args()
    enter()
    folder = (arguments.keep or Path(tempfile.mkdtemp(prefix="chaos-"))).absolute()
    folder.mkdir(exist_ok=True)
    hosts = [Host(1), Host(2)]
    scene = Scene(folder / "chaos", [*OVERRIDES, f"seed={arguments.seed}"], hosts)
    line = _disturbed(scene, arguments.faults, arguments.seed, arguments.kinds)
    if arguments.compare:
        line["accuracy"] = score(scene.run_dir, NUM_DRAWS)
        calm = Scene(folder / "calm", scene.overrides, hosts)
        line["undisturbed"] = _undisturbed(calm, min(arguments.compare, line["num_steps"]))
    print(json.dumps(line), flush=True)
    if not arguments.keep:
        for mounted in folder.glob("*/checkpoints"):
            subprocess.run(["umount", str(mounted)], check=True)
        shutil.rmtree(folder)
    faultless = line["lost"] == line["doubled"] == line["orphans"] == line["unexplained_stalls"] == 0
    ends = (line["stopped_with"], line["exit_code"], line["whole"])
    return 0 if faultless and line["survived"] == line["faults"] == arguments.faults and ends == (143, 0, True) else 1


def _disturbed(scene: Scene, num_faults: int, seed: int, names: list[str]) -> dict[str, Any]:
    started, rng = time.time(), random.Random(seed)
    scene.start(NO_END)
    scene.wait("the first checkpoint with all rollouts", lambda: scene.saved() and scene.seen[-1].num_live == 3, 300.0)
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: {"faults": 0, "survived": 0, "longest_stall_s": 0.0})
    for number, fault in enumerate(schedule(num_faults, names, rng), 1):
        kind, began = kinds[fault.__name__], time.time()
        survived = _play(scene, fault(scene, rng))
        stall = max(end - begin for begin, end in _gaps(scene, began, time.time()))
        kind["faults"] += 1
        kind["survived"] += survived
        kind["longest_stall_s"] = max(kind["longest_stall_s"], round(stall, 1))
        _tell(
            f"{number} {fault.__name__}: {'survived' if survived else 'NOT SURVIVED'}, {time.time() - began:.1f} s, longest "
            f"stall {stall:.1f} s, version {scene.version}"
        )
        _breathe(scene, rng.randint(0, 3))
    gaps = [gap for gap in _gaps(scene, started, time.time()) if gap[1] - gap[0] > STALL_S]
    unexplained = [gap for gap in gaps[1:] if not scene.spoke(*gap)]  # the first is the start
    for begin, end in unexplained:
        _tell(f"unexplained: {end - begin:.1f} s from {time.strftime('%H:%M:%S', time.localtime(begin))}")
    scene.train.send_signal(signal.SIGTERM)
    stopped, _ = scene.finish(120.0)
    num_steps = max(seen.version for seen in scene.seen[-3:]) + MORE_STEPS
    scene.start(num_steps)
    code, result = scene.finish(300.0)
    time.sleep(GRACE_S)
    strangers = scene.strangers()
    for stranger in strangers:
        _tell(f"orphan: {stranger}")
    return {
        "seed": seed,
        "faults": sum(int(kind["faults"]) for kind in kinds.values()),
        "survived": sum(int(kind["survived"]) for kind in kinds.values()),
        **verdict(scene.run_dir, result),
        "orphans": len(strangers),
        "unexplained_stalls": len(unexplained),
        "stopped_with": stopped,
        "exit_code": code,
        "kinds": kinds,
        "num_steps": num_steps,
        "incarnations": scene.incarnation,
        "curve": curve(scene.run_dir),
        "seconds": round(time.time() - started),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "commit": _commit(),
    }


def _play(scene: Scene, fault) -> bool:
    condition = None
    try:
        time.sleep(next(fault))
        next(fault)
    except StopIteration as end:
        condition = end.value
    healed = time.time()

    def recovered() -> bool:
        after = scene.since(healed)
        return len(after) >= QUIET_STEPS and after[-1].num_live == 3 and (condition is None or bool(condition()))

    return scene.wait("the run to recover", recovered, RECOVERY_S)


def _breathe(scene: Scene, num_steps: int) -> None:
    begin = time.time()
    scene.wait("some quiet", lambda: len(scene.since(begin)) >= num_steps, 60.0)


def _gaps(scene: Scene, begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """Times without a new version, in order."""
    marks = [begin_s, *(seen.time_s for seen in scene.seen if begin_s < seen.time_s < end_s), end_s]
    return list(itertools.pairwise(marks))


def _undisturbed(scene: Scene, num_steps: int) -> dict[str, Any]:
    """The same run left in peace."""
    scene.start(num_steps)
    code, _ = scene.finish(1800.0)
    learnt = {"curve": curve(scene.run_dir), "accuracy": score(scene.run_dir, NUM_DRAWS)}
    return {"num_steps": num_steps, "exit_code": code, **learnt}


def _commit() -> str:
    return subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _tell(text: str) -> None:
    print(f"chaos: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
