"""The key folder: the learner's pair, a rollout's pair, and the public keys of the rollouts that the learner lets in.

Owns the folder's layout and what may be wrong with it; the files are pyzmq's own certificates (zmq.auth), the keys CURVE's.
Invariant: nothing is written over, no secret is readable by anybody but its owner, and a mistake is one ConfigError.

    learner.key, learner.key_secret    the learner; rollouts need only the first of the two
    rollout.key, rollout.key_secret    a rollout, as many processes of it as you like
    rollouts/NAME.key                  whom the learner knows: add files, or remove them
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.utils import z85

from async_rl.config import ConfigError

_log = logging.getLogger(__name__)
LEARNER, ROLLOUT, KNOWN = "learner", "rollout", "rollouts"
PUBLIC, SECRET = ".key", ".key_secret"
REREAD_S = 1.0  # at most so often the folder of known keys is looked at


class Pair(NamedTuple):
    """A CURVE key pair in Z85, as sockets take it."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class RolloutKeys:
    """Who a rollout is, and the only learner it speaks to."""

    own: Pair
    learner: bytes


class Known:
    """The public keys in a folder, read again when a file has come or gone, so that nobody has to be restarted."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when any file is damaged; one that becomes so later is left out and said."""
        self._folder = folder
        self._keys = frozenset(_public(path) for path in _certificates(folder))
        self._changed_ns, self._looked_s = _changed_ns(folder), time.monotonic()

    def __contains__(self, public: bytes) -> bool:
        if time.monotonic() - self._looked_s > REREAD_S:
            self._look()
        return public in self._keys

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        changed_ns = _changed_ns(self._folder)
        if changed_ns == self._changed_ns:
            return
        found = set()
        try:
            for path in _certificates(self._folder):
                try:
                    found.add(_public(path))
                except ConfigError as e:
                    _log.warning("%s; it is left out", e)
        except ConfigError as e:
            _log.warning("%s; nobody is known now", e)
        self._keys, self._changed_ns = frozenset(found), changed_ns
        _log.info("%d rollout keys are known now", len(found))


@dataclass(frozen=True)
class LearnerKeys:
    own: Pair
    known: Known


def make_keys(folder: Path) -> None:
    """A new key folder, whole or not at all. Raises ConfigError."""
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists, and keys are never written over: name a new folder, or remove that one first")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))  # mode 0700: nobody looks in meanwhile
    except OSError as e:
        raise ConfigError(f"{folder} cannot be made ({e.strerror}): name another folder") from None
    try:
        (partial / KNOWN).mkdir(mode=0o700)
        for name in (LEARNER, ROLLOUT):
            create_certificates(partial, name)
            (partial / f"{name}{SECRET}").chmod(0o600)
        shutil.copy(partial / f"{ROLLOUT}{PUBLIC}", partial / KNOWN)
        partial.rename(folder)
    except OSError as e:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"{folder} cannot be made ({e.strerror}): name another folder") from None


def read_learner_keys(folder: Path) -> LearnerKeys:
    """Raises ConfigError."""
    _require_private(folder)
    keys = LearnerKeys(_pair(folder / f"{LEARNER}{SECRET}"), Known(folder / KNOWN))
    if not _certificates(folder / KNOWN):
        raise ConfigError(f"transport.keys is {folder}, where {KNOWN}/ holds no *{PUBLIC}, so no rollout could join: add one")
    return keys


def read_rollout_keys(folder: Path) -> RolloutKeys:
    """Raises ConfigError."""
    _require_private(folder)
    return RolloutKeys(_pair(folder / f"{ROLLOUT}{SECRET}"), _public(folder / f"{LEARNER}{PUBLIC}"))


def _require_private(path: Path) -> None:
    try:
        mode = path.stat().st_mode & 0o777
    except OSError as e:
        raise ConfigError(
            f"transport.keys needs {path}, which cannot be read ({e.strerror}): make a key folder with `async-rl keys DIR`"
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"transport.keys: {path} has mode {mode:04o}, so others than its owner can get at secrets: chmod go-rwx {path}"
        )


def _pair(path: Path) -> Pair:
    _require_private(path)
    public, secret = _load(path)
    if secret is None or _derived(secret) != public:
        raise ConfigError(
            f"transport.keys: {path} is damaged, its keys are no pair: make a new folder with `async-rl keys DIR`"
        )
    return Pair(public, secret)


def _public(path: Path) -> bytes:
    public, _ = _load(path)
    if len(public) != 40 or not _is_z85(public):
        raise ConfigError(f"transport.keys: {path} is damaged, it holds no public key: copy it again from its owner")
    return public


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(path)
    except (OSError, ValueError, IndexError) as e:
        why = "is missing" if not path.exists() else f"cannot be used ({e})"
        raise ConfigError(
            f"transport.keys: {path} {why}: copy it again, or make a key folder with `async-rl keys DIR`"
        ) from None


def _is_z85(key: bytes) -> bool:
    try:
        return len(z85.decode(key)) == 32
    except Exception:  # pyzmq raises whatever its arithmetic meets
        return False


def _derived(secret: bytes) -> bytes:
    try:
        return zmq.curve_public(secret) if len(secret) == 40 and _is_z85(secret) else b""
    except (zmq.ZMQError, ValueError):
        return b""


def _certificates(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(PUBLIC))
    except OSError as e:
        raise ConfigError(
            f"transport.keys needs {folder} with the public keys of rollouts, which cannot be read ({e.strerror})"
        ) from None


def _changed_ns(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return -1
