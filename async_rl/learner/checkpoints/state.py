"""Rank 0's part of a checkpoint: the version, what the dealer hands out next, the ledger, the gate and the scale of rewards.

Owns its form in bytes. Invariant: whatever the bytes hold, what comes of them is a whole state or one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from async_rl.data.ledger import Ledger
from async_rl.data.record import LedgerError
from async_rl.learner import LearnerError
from async_rl.learner.control.dealer import Dealer
from async_rl.learner.update.gate import Gate
from async_rl.learner.update.shaping import RewardShaping
from async_rl.observability.log import get_logger
from async_rl.transport.codec import BadMessage, decode_group, encode_group

_log = get_logger(__name__)
MAX_INCARNATION = 2**31 - 1  # the wire has four bytes for that of a token


class Kept(NamedTuple):
    """What goes on where it was when a run is resumed."""

    dealer: Dealer
    ledger: Ledger
    gate: Gate
    shaping: RewardShaping


@dataclass(frozen=True)
class State:
    checkpoint: Path
    version: int
    incarnation: int  # that saved it
    held: dict[str, Any]
    position: int | None = None  # in the run's record; None: it had none

    def restore(self, kept: Kept) -> None:
        """All go on where they were. Raises LearnerError, or PromptError when it is of other prompts."""
        with _damage_told(self.checkpoint):
            more_answers = self._more_answers(kept.dealer)
            kept.dealer.load_state_dict(self.held["dealer"])
            kept.gate.load_state_dict(self.held["gate"])
            kept.gate.saved(self.version)
            kept.shaping.load_state_dict(self.held["shaping"])
            try:
                kept.ledger.load_state_dict(self.held["ledger"], decode_group, more_answers)
            except BadMessage as e:
                raise LearnerError(
                    f"the checkpoint holds groups that this version of async_rl cannot read ({e}): go on with the version that "
                    "wrote it, or start a new run_dir"
                ) from None
        if more_answers and (num := len(kept.ledger.unleased)):
            with_or_without = "without" if more_answers > 0 else "with"
            told = "%d unfinished groups of the checkpoint are sampled anew: they were dealt %s a greedy answer"
            _log.warning(told, num, with_or_without)

    def _more_answers(self, dealer: Dealer) -> int:
        """What a group of this life has more than one of the saved ledger, which was dealt with a greedy answer or without."""
        saved = self.held["dealer"].get("num_greedy", dealer.num_greedy)  # a state of before this was saved: as now
        if saved not in (0, 1):
            raise ValueError(f"{saved!r} greedy answers per group")
        return dealer.num_greedy - saved


def pack_state(version: int, kept: Kept, position: int | None = None) -> bytes:
    """`position`: how much of the run's record, if there is one, belongs to this state."""
    held = {
        "version": version,
        "dealer": kept.dealer.state_dict(),
        "ledger": kept.ledger.state_dict(encode_group),
        "gate": kept.gate.state_dict(),
        "shaping": kept.shaping.state_dict(),
        "record": position,
    }
    packed = msgpack.packb(held)
    assert packed is not None
    return packed


def unpack_state(packed: bytes, checkpoint: Path) -> State:
    """Raises LearnerError when it cannot be read; the folder is named in it."""
    with _damage_told(checkpoint):
        held = msgpack.unpackb(packed, strict_map_key=False)
        version, incarnation = held["version"], held["ledger"]["resumes"][-1][0]
        if not (isinstance(version, int) and isinstance(incarnation, int) and 0 < incarnation < MAX_INCARNATION):
            raise ValueError(f"version {version!r} of incarnation {incarnation!r}")
        position = held.get("record")
        if position is not None and not (isinstance(position, int) and position >= 0):
            raise ValueError(f"position {position!r} in the record")
        return State(checkpoint, version, incarnation, held, position)


@contextmanager
def _damage_told(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, LedgerError) as e:
        raise LearnerError(
            f"the state in checkpoint {checkpoint} cannot be read ({type(e).__name__}: {e}): remove that folder to go on from "
            "an older one, or choose another run_dir"
        ) from None
