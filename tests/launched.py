"""A launcher over stand-ins (launcher_fakes.py), for the tests that start one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

FAKES = Path(__file__).with_name("launcher_fakes.py")


class Launched:
    """A launcher over stand-ins, in a session of its own; killed at the end of the test whatever happens."""

    def __init__(
        self, folder: Path, learner: str, rollout: str, through: tuple[str, ...] = (), terminal: int = subprocess.PIPE
    ) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [*through, sys.executable, str(FAKES), "launcher", learner, rollout, str(folder)],
            stdout=terminal,
            stderr=terminal,
            text=True,
            start_new_session=True,
        )

    def end(self, timeout_s: float = 60) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def pids(self, role: str) -> list[int]:
        return [int(path.suffix[1:]) for path in self.folder.glob(f"{role}.*")]

    def wait_for(self, role: str, timeout_s: float = 40) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.pids(role):
            assert time.monotonic() < deadline and self.process.poll() is None, f"{role} did not start"
            time.sleep(0.02)

    def survivors(self) -> list[int]:
        """Of all processes that ran for it, those that live 5 s later."""
        pids = [pid for role in ("learner", "rank", "rollout") for pid in self.pids(role)]
        if (self.folder / "helper").exists():
            pids.append(int((self.folder / "helper").read_text()))
        deadline = time.monotonic() + 5
        while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
