"""`async-rl eval` with real engines: the figure of an exported policy is the one that its run wrote, exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .runs import QUICKSTART, ROOT, random_model, train

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
# The reward tells every answer from every other, so equal scores mean equal answers.
TASK = ("data.num_items=2000", "data.reward=tests.reward_functions:fingerprint", "eval.draws=48")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "async_rl", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=400)


def answered(*arguments: str) -> dict[str, Any]:
    done = command(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_both_engines_score_an_export_as_its_run_did(tmp_path: Path) -> None:
    model = f"model.path={random_model(tmp_path / 'random')}"
    with train(tmp_path, *TASK, model, "model.make=null", "num_steps=3", "eval.every=0", "learner.lr=1e-3") as run:
        result = run.finish(600)
    (_, untrained), (version, accuracy) = result["evals"]
    assert version == 3 and accuracy != untrained
    card = answered("export", str(run.run_dir), "--out", str(tmp_path / "out"))
    assert card["version"] == 3 and card["heldout_accuracy"] == accuracy
    for engine in ("vllm", "transformers"):
        said = answered("eval", str(tmp_path / "out"), str(QUICKSTART), *TASK, "--engine", engine)
        seconds = said.pop("seconds")
        assert said == {
            "accuracy": accuracy,
            "num": 48,
            "unscored": 0,
            "missing": 0,
            "draws": 48,
            "engine": engine,
            "model": str(tmp_path / "out"),
        }
        assert 0 < seconds < 400


def test_a_reward_that_always_raises_is_one_sentence(tmp_path: Path) -> None:
    model = str(random_model(tmp_path / "random"))
    task = ("data.num_items=200", "eval.draws=4", "data.reward=tests.reward_functions:raises")
    done = command("eval", model, str(QUICKSTART), *task, "--engine", "transformers")
    assert done.returncode == 4 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("async-rl: none of 4 answers counts, last error: reward tests.")
    assert "Traceback" not in done.stderr
