"""Whole runs of two learner ranks: what must not set them apart."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from .runs import assert_books_balance, random_model, rollout, train

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(300)]
TWO = ("rollout.engine=toy", "model.make=null", "groups_per_step=4", "rollout.num_slots=4", "eval.draws=0", "learner.ranks=2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.path={random_model(tmp_path_factory.mktemp('models') / 'random')}"


def test_a_checkpoint_that_cannot_be_written_costs_two_ranks_nothing_but_it(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TWO, model, "num_steps=40", "checkpoint.every=2") as run:
        checkpoints = run.run_dir / "checkpoints"
        run.wait_until("a checkpoint", (checkpoints / "latest").exists, 120)
        checkpoints.rename(run.run_dir / "moved")
        checkpoints.write_text("in the way")
        run.wait_until("the failure", lambda: "failed (1 in a row)" in run.text(), 60)
        checkpoints.unlink()
        result = run.finish(200)
    assert "resumed version" not in run.text()
    assert_books_balance(result, trained=160)


def test_a_signal_within_a_step_is_heeded_after_it_on_both_ranks(tmp_path: Path, model: str) -> None:
    with train(tmp_path, *TWO, model, "num_steps=1000", "rollout.count=0") as run:
        with rollout(run, "slow", frozen=["staged"], frozen_s=6.0):  # the next step waits, begun, until its publish is over
            run.wait_until("a step", lambda: len(run.steps()) >= 2, 120)
            time.sleep(3.0)
            run.popen.send_signal(signal.SIGTERM)
            assert run.popen.wait(120) == 128 + signal.SIGTERM
    assert "checkpoint of version" in run.text() and "lost another rank" not in run.text()
