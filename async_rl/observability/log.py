"""The process log: one line per event, with time, level, process and module. Imports the standard library only.

Invariant: only the package's own logger is configured; libraries keep theirs.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

ROOT = "async_rl"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module, under the package's own whatever `__name__` says (a `python -m` module is "__main__")."""
    return logging.getLogger(name if name == ROOT or name.startswith(f"{ROOT}.") else f"{ROOT}.{name.strip('_')}")


def rare(count: int) -> bool:
    """True for the first event of its kind and then each power of two: a flood must not become a flood of lines."""
    return count & (count - 1) == 0


class _LogFile(logging.FileHandler):
    """A log on a full disk loses lines; a traceback for each of them on stderr would help nobody."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            with contextlib.suppress(OSError):  # stderr may lie on the same disk
                print(f"log {self.baseFilename} loses lines ({error.strerror}): free space on its disk", file=sys.stderr)


def setup_logging(process_name: str, path: Path | None, level: str) -> None:
    """Send the package's log to a file, warnings also to stderr; without a file, all of it to stderr.

    `level` is debug, info or warning. May be called again: the latest call holds. Raises OSError when the file cannot be had.
    """
    form = logging.Formatter(f"%(asctime)s.%(msecs)03d %(levelname)s {process_name} %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    stderr = logging.StreamHandler(sys.stderr)
    handlers: list[logging.Handler] = [stderr]
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_LogFile(path, encoding="utf-8"))
        stderr.setLevel(logging.WARNING)
    root = logging.getLogger(ROOT)
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(form)
        root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False
