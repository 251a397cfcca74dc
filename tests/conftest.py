"""What all tests share: quiet, offline processes of one thread, and the order (process tests last)."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, so that what is plainly broken shows at once."""
    items.sort(key=lambda item: (item.get_closest_marker("slow") is not None, item.get_closest_marker("process") is not None))
