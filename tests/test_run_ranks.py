"""A whole run of two learner ranks, of which one fails."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from .runs import random_model, train

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(300)]
TOY = (
    "rollout.engine=toy", "model.make=null", "groups_per_step=4", "rollout.num_slots=4", "eval.draws=0", "learner.ranks=2",
)  # fmt: skip
BOOM = """
import os
if os.environ.get("RANK") == "1":
    from async_rl.learner.rank import Rank
    train = Rank.train
    def fails(self, batch, version, *args, **kwargs):
        if version == 2:
            raise ValueError("boom")
        return train(self, batch, version, *args, **kwargs)
    Rank.train = fails
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.path={random_model(tmp_path_factory.mktemp('models') / 'random')}"


def test_the_last_words_of_a_run_are_of_the_rank_that_failed_and_not_of_those_that_lost_it(tmp_path: Path, model: str) -> None:
    """BR-105."""
    (tmp_path / "sitecustomize.py").write_text(BOOM)
    with train(tmp_path, *TOY, model, "num_steps=1000", modules=tmp_path) as run:
        run.wait_until("the step that fails", lambda: len(run.steps()) >= 2, 120)
        begin = time.monotonic()
        assert run.popen.wait(60) == 1
        assert time.monotonic() - begin < 15
        assert run.pids() == []
    *lines, last = run.text().splitlines()
    assert any("rank 1 failed: ValueError: boom" in line for line in lines[-22:])
    assert json.loads(last)["reason"] == "the learner ended with exit code 1: rank 1 failed: ValueError: boom"
    assert "has lost another rank" in (run.run_dir / "logs" / "learner-0.log").read_text()
