"""How a run ended, for its last line and its `result.json`: what the learner wrote, or what only the launcher can say.

Imports observability only. Invariant: status, exit code and reason are those of the run that has just ended, never of an
earlier one in the folder (`claim` has moved its result aside) nor of a learner that was overruled.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from async_rl.observability.files import replace_file


class Ending(NamedTuple):
    """What the launcher saw."""

    code: int
    status: Literal["finished", "stopped", "failed"]
    reason: str


def learners_result(run_dir: Path) -> dict[str, Any]:
    """What the learner wrote of this run; {} when it came to no end of its own."""
    try:
        result = json.loads((run_dir / "result.json").read_text())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def settle(run_dir: Path, ending: Ending, *, keep: bool) -> dict[str, Any]:
    """The result of the run: the learner's, unless there is none or it ended otherwise than the run. Kept in the folder
    with `keep`."""
    result = learners_result(run_dir)
    if result and result.get("exit_code", ending.code) == ending.code:
        return result
    result |= {"status": ending.status, "exit_code": ending.code, "reason": ending.reason, "run_dir": str(run_dir)}
    if keep:
        with contextlib.suppress(OSError):  # a full disk may be why the run ended: the last line says it all the same
            replace_file(run_dir / "result.json", json.dumps(result).encode())
    return result
