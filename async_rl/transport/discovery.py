"""The discovery file `learner.json`: where the learner is, and which life of it.

Owns the file's format; imports base. Invariant: a reader sees a whole file or none; the file carries an address, never data
or control. Written by the learner once its sockets are bound, re-read by rollouts at every reconnect.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from async_rl.transport.base import TransportError
from async_rl.transport.messages import Count, Text

MAX_FILE_BYTES = 1 << 16


class Discovery(BaseModel):
    """What a rollout must know to say Hello."""

    model_config = ConfigDict(frozen=True)
    control_address: Text
    incarnation: Count
    run_id: Text


def write_discovery(path: str | Path, discovery: Discovery | dict[str, Any]) -> None:
    """Put the file in place at once, readable by its owner only. Raises TransportError when it cannot be written."""
    path = Path(path)
    content = Discovery.model_validate(discovery).model_dump_json()
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as e:
        raise TransportError(f"discovery file {path} cannot be written ({e.strerror}): check run_dir") from None


def read_discovery(path: str | Path) -> Discovery | None:
    """The file's content, or None while there is none or it is not a whole and valid one."""
    try:
        with open(path, "rb") as file:
            return Discovery.model_validate_json(file.read(MAX_FILE_BYTES))
    except (OSError, ValidationError):
        return None
