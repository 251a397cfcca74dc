"""Whether the run in a folder has finished, by its `result.json`, for all who might join or go on with it.

Imports the standard library only. Invariant: a result that cannot be read, or is of a run that stopped or failed, ends nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

RESULT = "result.json"
REPLAY = "replay.json"  # in the folder of a replay: of what, and by which keys


def steps_done(run_dir: Path, since_s: float = 0.0) -> int:
    """Steps of the run in this folder if it has finished, no earlier than at `since_s` of the wall clock, else 0."""
    path = run_dir / RESULT
    try:
        result = json.loads(path.read_text())
        finished = result["status"] == "finished" and path.stat().st_mtime >= since_s
        return int(result["policy_version"]) if finished else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def nobody_left(run_dir: Path, steps: int) -> str:
    """What is told to whom would join it."""
    return f"the run in {run_dir} has finished its {steps} steps: nobody is left to join"
