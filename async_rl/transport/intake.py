"""The learner's gate: frames in, events out, refusals counted by reason.

Owns the counting shared by every hub; imports base and codec. Invariant: a message is either returned or counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from async_rl.observability.log import rare
from async_rl.transport.base import Delivered, Peer, Said
from async_rl.transport.codec import BadMessage, Frame, decode, decode_group

_log = logging.getLogger(__name__)


class Intake:
    """Decodes what arrives on both channels; `refused` counts what was not taken, by reason."""

    def __init__(self, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes
        self.refused: Counter[str] = Counter()

    def said(self, frames: Sequence[Frame]) -> Said | None:
        """The control message in [peer, content], or None when it was refused."""
        try:
            if len(frames) != 2:
                raise BadMessage("frames", f"a control message of {len(frames) - 1} frames where 1 is due")
            return Said(Peer(frames[0]), decode(frames[1]))
        except BadMessage as e:
            self.refuse(e)
            return None

    def delivered(self, frames: Sequence[Frame]) -> Delivered | None:
        """The group in the frames of one data message, or None when it was refused."""
        try:
            return Delivered(decode_group(frames, self.max_message_bytes), sum(len(frame) for frame in frames))
        except BadMessage as e:
            self.refuse(e)
            return None

    def refuse(self, bad: BadMessage) -> None:
        """Count it, and log it now and then."""
        self.refused[bad.reason] += 1
        count = self.refused[bad.reason]
        if rare(count):
            _log.warning("refused a message, number %d of its kind: %s", count, bad)
