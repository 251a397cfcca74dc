"""Rollouts that a person starts: whether this name may join, asked before an engine is loaded for nothing.

Imports config, transport's pattern of a name, and the status files. Invariant: who is frozen or silent keeps no name from
anybody; then the learner decides.
"""

from __future__ import annotations

import re
from pathlib import Path

from async_rl.config import Config, ConfigError
from async_rl.launcher.plan import own_names
from async_rl.launcher.status import lives
from async_rl.observability.status import read
from async_rl.transport.messages import NAME


def check_name(run_dir: Path, config: Config, name: str) -> None:
    """Raises ConfigError when it is no name, one of the launcher's, or that of a rollout that lives."""
    if not re.match(NAME, name):
        raise ConfigError(f"--name is '{name}': use letters, digits, dots and dashes, at most 64")
    if name in own_names(config):
        count = config.rollout.count
        raise ConfigError(f"--name is {name}, which is the launcher's own (rollout.count={count}): choose another --name")
    for word in read(run_dir):
        if word["process"] == name and lives(word):
            raise ConfigError(
                f"--name is {name}, and {name} with pid {word['pid']} lives: choose another --name, or stop that one"
            )
