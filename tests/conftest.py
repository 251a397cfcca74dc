"""What all tests share: quiet, offline processes of one thread, and the order (process tests last)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .launched import Launched

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, so that what is plainly broken shows at once."""
    items.sort(key=lambda item: (item.get_closest_marker("slow") is not None, item.get_closest_marker("process") is not None))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts launchers over stand-ins in tmp_path/run; whatever lives at the end of the test is killed."""
    running: list[Launched] = []

    def start(learner: str, rollout: str, **options) -> Launched:
        running.append(Launched(tmp_path / "run", learner, rollout, **options))
        return running[-1]

    yield start
    for launched in running:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.wait(10)
        for pid in launched.survivors():
            os.kill(pid, signal.SIGKILL)
