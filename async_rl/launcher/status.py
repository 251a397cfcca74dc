"""`async-rl status`: who is at work in a run folder, what each does and waits for, whoever is frozen or dead.

Imports observability only; asks no process of the run, reads its files and the system's table of processes. Invariant: what
is said of a process names how old the word is when the process does not give a newer one.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from async_rl.observability import stacks
from async_rl.observability.finished import RESULT
from async_rl.observability.status import read

QUIET_S = 5.0  # a process writes every second; a busy machine may be late
ORDER = ("launcher", "learner-")

Said = dict[str, Any]


def status(run_dir: Path, with_stacks: bool = False) -> list[str]:
    """The lines to print."""
    said = sorted(read(run_dir), key=_rank)
    if not any(_lives(word) for word in said):
        return [f"no run is going on in {run_dir}: {_how_it_ended(run_dir, said)}"]
    table = next((word for word in said if "members" in word), {})
    members = {member["process"]: member for member in table.get("members", ())}
    lines = [line for word in said for line in _lines(word, members.pop(word["process"], {}), _age(table))]
    lines += [_member_line(member, _age(table)) for member in members.values()]
    if "ledger" in table:
        lines.append(f"groups: {_groups(table['ledger'])}" + _as_of(_age(table)))
    return lines + (list(_ask_for_stacks(run_dir, said)) if with_stacks else [])


def _rank(word: Said) -> tuple[int, str]:
    name = word["process"]
    return next((n for n, prefix in enumerate(ORDER) if name.startswith(prefix)), len(ORDER)), name


# ---- signs of life


def _process(pid: int | None, born: float | None = None) -> psutil.Process | None:
    """The process of this host with that pid, unless it has ended; `born` tells it from a later one."""
    try:
        process = psutil.Process(pid) if pid and pid > 0 else None
        if process and process.status() != psutil.STATUS_ZOMBIE and (born is None or process.create_time() == born):
            return process
    except (psutil.NoSuchProcess, OverflowError):
        pass
    return None


def _here(word: Said) -> bool:
    return word.get("host") == socket.gethostname()


def lives(word: Said) -> bool:
    """Whether it has said this a moment ago and is there."""
    return _age(word) < QUIET_S and _lives(word)


def _lives(word: Said) -> bool:
    return _process(word.get("pid"), word.get("born")) is not None if _here(word) else _age(word) < QUIET_S


def _age(word: Said) -> float:
    return max(0.0, time.time() - word.get("written", 0.0))


def _trouble(word: Said) -> str:
    """Why no newer word is to be had, or ""."""
    age = _age(word)
    if not _here(word):
        return f"no sign of life for {age:.0f} s, on {word.get('host')}" if age > QUIET_S else ""
    process = _process(word.get("pid"), word.get("born"))
    if process is None:
        return f"DEAD, it said its last word {age:.0f} s ago"
    return _frozen(process, age) or (f"NO SIGN OF LIFE for {age:.0f} s (frozen, or its disk is full)" if age > QUIET_S else "")


def _frozen(process: psutil.Process, age_s: float) -> str:
    try:
        stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return "DEAD"
    return f"FROZEN (state T), no sign of life for {age_s:.0f} s" if stopped else ""


# ---- lines


def _lines(word: Said, member: Said, table_age_s: float) -> Iterator[str]:
    """Of one process, and of its engine core."""
    parts = [f"{word.get('id') or word['process']:<14} pid {word.get('pid')}", _trouble(word), word.get("state", "starting")]
    if "weights" in word:
        parts.append(f"weights {word['weights'] or 'none yet'}")
    if "leases" in word:
        parts.append(f"{word['leases']} leases, {word.get('unacknowledged', 0)} unacknowledged")
    if member:
        parts.append(f"heard by the learner {member['heartbeat_age_s'] + table_age_s:.1f} s ago")
    elif "leases" in word:
        parts.append("not known to the learner")
    yield "  ".join(filter(None, [*parts, "; ".join(map(str, word.get("waits", ())))]))
    if word.get("core"):
        yield _core_line(word)


def _core_line(word: Said) -> str:
    silent_s = word.get("core_age_s", 0.0) + _age(word)
    how = f"answered {silent_s:.1f} s ago"
    if _here(word):
        process = _process(word["core"])
        how = "DEAD" if process is None else _frozen(process, silent_s) or how
    return f"{'  engine core':<14} pid {word['core']}  {how}"


def _member_line(member: Said, table_age_s: float) -> str:
    """Of a rollout whose own word is not to be had here: what the learner knows."""
    return (
        f"{member['id']:<14} pid {member['pid']} elsewhere  {member['state']}  weights {member['weights'] or 'none yet'}  "
        f"{member['leases']} leases  heard by the learner {member['heartbeat_age_s'] + table_age_s:.1f} s ago"
    )


def _groups(counts: Said) -> str:
    flat = {name: sum(n.values()) if isinstance(n, dict) else n for name, n in counts.items()}
    return ", ".join(f"{n} {name}" for name, n in flat.items())


def _as_of(age_s: float) -> str:
    return f" (as of {age_s:.0f} s ago)" if age_s > QUIET_S else ""


def _how_it_ended(run_dir: Path, said: list[Said]) -> str:
    try:
        result = json.loads((run_dir / RESULT).read_text())
        return f"the last one {result['status']} with exit code {result['exit_code']}: {result['reason']}"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if said:
        return f"the last one came to no end of its own, {', '.join(word['process'] for word in said)} were killed"
    return "none has been started, or the last one was killed"


def _ask_for_stacks(run_dir: Path, said: list[Said]) -> Iterator[str]:
    for word in said:
        if not _here(word) or not _lives(word):
            continue
        for who, pid in ((word["process"], word["pid"]), (f"the engine core of {word['process']}", word.get("core"))):
            if pid and stacks.ask(pid):
                process = _process(pid)
                later = ", once it goes on" if process and _frozen(process, 0.0) else ""
                yield f"stacks of {who}: {run_dir / word['stacks']}{later}"
            elif pid:
                yield f"stacks of {who} cannot be had: pid {pid} does not listen yet"
