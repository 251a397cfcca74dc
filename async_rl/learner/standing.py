"""Where rank 0 stands, for `async-rl status`: version, members, books.

Imports members and trainer. Invariant: it waits for the lock no longer than LOCK_S, and says so when it did not get it.
"""

from __future__ import annotations

import time
from typing import Any

from async_rl.learner.control.members import Member
from async_rl.learner.trainer import Trainer

LOCK_S = 0.5


def standing(trainer: Trainer) -> dict[str, Any]:
    """What rank 0's status file holds beside the waits. For any thread."""
    control = trainer.control
    incarnation = control.identity.incarnation
    said: dict[str, Any] = {"weights": f"{incarnation}:{trainer.version}", "state": trainer.commands.doing}
    if not control.changed.acquire(timeout=LOCK_S):
        return said | {"state": f"{said['state']}, its lock has been held for {LOCK_S:g} s"}
    try:
        members = [_member(m, incarnation) for m in control.members]
        return said | {"members": members, "ledger": control.ledger.books()["groups"]}
    finally:
        control.changed.release()


def _member(member: Member, incarnation: int) -> dict[str, Any]:
    unheard_s = time.monotonic() - member.heard_s
    return {
        "id": member.rollout_id,
        "process": member.name,
        "pid": member.pid,
        "state": member.phase or "joining",
        "weights": "" if member.committed is None else f"{incarnation}:{member.committed}",
        "leases": len(member.held) + len(member.evaluating),
        "heartbeat_age_s": unheard_s,
        "core_age_s": member.engine_age_s + unheard_s,
    }
