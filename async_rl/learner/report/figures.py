"""What the learner can say of itself between two rows: the figures of a scrape that are not in the metrics.

Reads the control plane under its lock, for a moment. Imports the control plane and observability. Invariant: label values are
states and reasons of the ledger and of the wire, which are this program's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.learner.control.plane import ControlPlane
from async_rl.observability.prometheus import Figure


def figures(control: ControlPlane) -> list[Figure]:
    with control.changed:
        books = control.ledger.books()
        members = [member.live for member in control.members]
        malformed, disconnects = dict(control.hub.refused), control.hub.disconnects
        version, incarnation = control.ledger.version, control.identity.incarnation
        generated = control.members.generated_tokens
    return [
        _one("version", "Policy version of the learner.", version),
        _one("incarnation", "Which life of the learner this is.", incarnation),
        _one("members", "Rollouts that are connected.", len(members)),
        _one("members_live", "Rollouts that serve weights of this run.", sum(members)),
        _one("generated_tokens", "Tokens that rollouts have reported.", generated),
        _one("ledger_balanced", "1 while every group and token is accounted for, else 0.", books["balanced"]),
        Figure("ledger_groups", "Groups granted, by where they are or went.", _by_state(books["groups"]), "state"),
        Figure("ledger_tokens", "Response tokens received, by where they are or went.", _by_state(books["tokens"]), "state"),
        Figure("refused_groups", "Deliveries refused, by reason.", books["refused"], "reason"),
        Figure("malformed_messages", "Messages that could not be read, by reason.", malformed, "reason"),
        _one("disconnects", "Connections to the learner that have ended, whatever the cause.", disconnects),
    ]


def _one(name: str, text: str, value: float) -> Figure:
    return Figure(name, text, {"": float(value)})


def _by_state(counts: Mapping[str, Any]) -> dict[str, float]:
    """`granted` and `received` are the sums of the others."""
    flat = {name: float(count) for name, count in counts.items() if name != "dropped"}
    return flat | {f"dropped_{reason}": float(count) for reason, count in counts["dropped"].items()}
