"""What is left when a run is over: whether anything was lost or doubled, and what the policy has learnt.

Reads the run's record, books and newest checkpoint. Invariant: what must be 0 is counted in the record, not taken from the
books alone.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from async_rl.config import load_config
from async_rl.learner.report.recorder import BATCHES, RECORD, Recorded, read_record
from benchmarks.chaos.scene import ROOT
from benchmarks.learner_kills import audit

BLOCK_STEPS = 10
PUPIL = "rollout-0#"  # whose answers are the policy's own
EVAL_TIMEOUT_S = 600.0


def verdict(run_dir: Path, result: dict[str, Any]) -> dict[str, Any]:
    """`lost` and `doubled` count groups and prompts, in the surviving timeline; the rest explains them."""
    found = audit(run_dir, load_config(run_dir / "config.yaml"), result)
    doubled = found["doubled"] + found["prompts_twice_in_an_epoch"]
    lost = found["lost"] + found["expected"] - found["in_record"] + doubled
    whole = found["steps"] and found["versions"] and found["balanced"] and found["prompts_not_as_dealt"] == 0
    return {"lost": lost, "doubled": doubled, "whole": whole, "lag_max": found["lag_max"], "ledger": result["ledger"]}


def curve(run_dir: Path) -> list[float]:
    """Mean reward of what the policy itself answered, by blocks of BLOCK_STEPS steps; a block without any is left out."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for entry in read_record(run_dir / RECORD / BATCHES):
        if not isinstance(entry, Recorded):
            continue
        for record in entry.records:
            if record.payload is not None and record.payload.rollout_id.startswith(PUPIL):
                scored = [t.reward for t in record.payload.trajectories if t.reward == t.reward]
                rewards[entry.version // BLOCK_STEPS] += scored
    return [round(statistics.mean(rewards[block]), 3) for block in sorted(rewards) if rewards[block]]


def score(run_dir: Path, num_draws: int) -> float:
    """Held-out accuracy of the newest checkpoint, by transformers."""
    exported = run_dir.with_suffix(".export")
    _command("export", str(run_dir), "--out", str(exported))
    own = (f"eval.draws={num_draws}", "eval.timeout_s=300")
    said = _command("eval", str(exported), "configs/quickstart.yaml", *own, "--engine", "transformers")
    return said["accuracy"]


def _command(*words: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "async_rl", *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=EVAL_TIMEOUT_S, check=True)
    return json.loads(done.stdout.splitlines()[-1])
