"""What a process is doing, in a small file of its run that a person reads with `async-rl status`.

Owns RUN_DIR/status/PROCESS.json. Imports the standard library, psutil and the reporter. Invariants: these files decide nothing
but whether a rollout that died was of use, and whether others are left (launcher/train.py); a process never fails, nor waits,
because of its own; while a fork is made the writing thread is at rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from async_rl.observability import stacks, waiting

FOLDER = "status"
EVERY_S = 1.0
SHORT_S = 1.0  # shorter waits are the ordinary course of things

Kinds = Mapping[str, Any]
NUMBER = int | float
ALWAYS: Kinds = {"process": str, "pid": int, "born": NUMBER, "host": str, "stacks": str, "written": NUMBER, "waits": list}
AT_TIMES: Kinds = {
    **{"id": str, "state": str, "weights": str, "leases": int, "unacknowledged": int, "core": int | None, "core_age_s": NUMBER},
    **{"delivered": int, "learner_age_s": NUMBER, "members": list, "ledger": dict},
}
MEMBER: Kinds = {
    **{"id": str, "process": str, "pid": int, "state": str, "weights": str, "leases": int},
    **{"heartbeat_age_s": NUMBER, "core_age_s": NUMBER},
}

_resting = threading.Lock()
os.register_at_fork(before=_resting.acquire, after_in_parent=_resting.release, after_in_child=_resting.release)


class StatusFile:
    """One per process. `look` says more than who it is; it may be replaced at any time, and must not wait for long."""

    def __init__(self, run_dir: Path, process: str) -> None:
        self.look: Callable[[], dict[str, Any]] = dict
        self._path = run_dir / FOLDER / f"{process}.json"
        self._own = {
            "process": process,
            "pid": os.getpid(),
            "born": psutil.Process().create_time(),
            "host": socket.gethostname(),
            "stacks": f"logs/{process}.log",
        }
        self._closed = threading.Event()
        stacks.register(run_dir / "logs" / f"{process}.log")

    def start(self) -> StatusFile:
        """Write it now, and every EVERY_S from a thread, until `close`."""
        self.write()
        threading.Thread(target=self._run, name="status", daemon=True).start()
        return self

    def write(self) -> None:
        """Once; for a process that must not have threads."""
        with contextlib.suppress(Exception):  # a full disk, or something half built: a person looks again in a second
            content = self._own | {"written": time.time(), "waits": waiting.lines(SHORT_S)} | self.look()
            beside = self._path.with_suffix(".new")
            with _resting:
                if not self._closed.is_set():
                    self._path.parent.mkdir(exist_ok=True)
                    beside.write_text(json.dumps(content))
                    beside.replace(self._path)

    def close(self) -> None:
        """The process has come to an end of its own: nobody shall look for it."""
        with _resting, contextlib.suppress(OSError):
            self._closed.set()
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed.wait(EVERY_S):
            self.write()


def forget(run_dir: Path) -> None:
    """Remove what processes of an earlier life have left; one that lives writes its file again."""
    for path in (run_dir / FOLDER).glob("*"):
        with contextlib.suppress(OSError):
            path.unlink()


def read(run_dir: Path) -> list[dict[str, Any]]:
    """What the processes have written last, by name."""
    found = []
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            content: Any = json.loads(path.read_text()) if path.is_file() else None
            if _fits(content, ALWAYS, AT_TIMES) and all(_fits(member, MEMBER) for member in content.get("members", ())):
                found.append(content)
    return found


def _fits(content: Any, always: Kinds, at_times: Kinds = MappingProxyType({})) -> bool:
    """Whether it is what a process writes: a file that is anything else is as good as none."""
    if not isinstance(content, dict) or not always.keys() <= content.keys():
        return False
    kinds = {**always, **at_times}
    known = [(content[name], kind) for name, kind in kinds.items() if name in content]
    return all(isinstance(value, kind) and not isinstance(value, bool) for value, kind in known)
