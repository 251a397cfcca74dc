"""Small files of a run folder, replaced whole, and what an earlier life left there, moved out of the way.

Imports config for its error. Invariant: a file is the old one or the new one, whatever the disk does, and nothing is
written over.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from async_rl.config import ConfigError


def read_run_id(run_dir: Path) -> str:
    """The name of the run that the folder holds. Raises ConfigError."""
    path = run_dir / "run.json"
    try:
        found = json.loads(path.read_text())["run_id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        found = None
    if not isinstance(found, str) or not found:
        raise ConfigError(f"{path} is missing or damaged, so the run that the folder holds has no name: choose another run_dir")
    return found


def replace_file(path: Path, data: bytes) -> None:
    """The file holds the old content or the new one, whatever happens. Raises OSError that names it."""
    beside = path.with_name(path.name + ".new")
    try:
        write_file(beside, data)
        beside.replace(path)
        sync_folder(path.parent)
    except OSError as e:
        with contextlib.suppress(OSError):
            beside.unlink()  # half a file is of no use, and may hold the space that others want
        raise of_file(e, path) from None


def write_file(path: Path, data: bytes) -> None:
    """Write and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def of_file(error: OSError, path: Path) -> OSError:
    """The same error with the file's name, which a failed write does not know."""
    return OSError(error.errno, error.strerror or str(error), str(path))


def give_mode_of(plain: Path) -> None:
    """All files beside `plain`, which was simply opened and written, get its mode: some libraries write through a temporary
    file that its owner alone may read, whatever the umask says."""
    mode = plain.stat().st_mode & 0o777
    for path in plain.parent.iterdir():
        if path.is_file():
            path.chmod(mode)


def set_aside(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """Rename those files and folders that hold something to NAME.n, with the first n that is free for all; the new paths."""
    held = [folder / name for name in names if _holds_something(folder / name)]
    n = 1
    while any((folder / f"{name}.{n}").exists() for name in names):
        n += 1
    return [path.rename(path.with_name(f"{path.name}.{n}")) for path in held]


def _holds_something(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0
