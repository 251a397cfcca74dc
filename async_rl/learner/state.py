"""Rank 0's part of a checkpoint: the version, where the prompt stream stands, the ledger, and how training is steered.

Owns its form in bytes. Invariant: whatever the bytes hold, what comes of them is a whole state or one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from async_rl.data.ledger import Ledger
from async_rl.data.prompts import PromptStream
from async_rl.data.record import LedgerError
from async_rl.learner import LearnerError
from async_rl.learner.gate import Gate
from async_rl.transport.codec import BadMessage, decode_group, encode_group

MAX_INCARNATION = 2**31 - 1  # the wire has four bytes for that of a token


@dataclass(frozen=True)
class State:
    checkpoint: Path
    version: int
    incarnation: int  # that saved it
    prompts: dict[str, Any]
    ledger: dict[str, Any]
    gate: dict[str, Any]

    def restore(self, prompts: PromptStream, ledger: Ledger, gate: Gate) -> None:
        """They go on where they were. Raises LearnerError, or PromptError when it is of other prompts."""
        with _damage_told(self.checkpoint):
            prompts.load_state_dict(self.prompts)
            gate.load_state_dict(self.gate)
            gate.saved(self.version)
            try:
                ledger.load_state_dict(self.ledger, decode_group)
            except BadMessage as e:
                raise LearnerError(
                    f"the checkpoint holds groups that this version of async_rl cannot read ({e}): go on with the version that "
                    "wrote it, or start a new run_dir"
                ) from None


def pack_state(version: int, prompts: PromptStream, ledger: Ledger, gate: Gate) -> bytes:
    held = {
        "version": version,
        "prompts": prompts.state_dict(),
        "ledger": ledger.state_dict(encode_group),
        "gate": gate.state_dict(),
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
        return State(checkpoint, version, incarnation, dict(held["prompts"]), held["ledger"], held["gate"])


@contextmanager
def _damage_told(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, LedgerError) as e:
        raise LearnerError(
            f"the state in checkpoint {checkpoint} cannot be read ({type(e).__name__}: {e}): remove that folder to go on from "
            "an older one, or choose another run_dir"
        ) from None
