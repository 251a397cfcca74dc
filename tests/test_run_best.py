"""Whole runs with the toy engine that keep their best checkpoint, end at a target, and are begun from an export."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from .runs import ROOT, Run, assert_books_balance, random_model, train

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(400)]
TOY = (
    "rollout.engine=toy",
    "model.make=null",
    "data.num_items=2000",
    "data.reward=tests.reward_functions:fingerprint",
    "groups_per_step=4",
    "rollout.num_slots=4",
    "checkpoint.every=1",
    "checkpoint.keep=1",
    "checkpoint.keep_best=true",
    "eval.draws=8",
    "eval.every=1",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.path={random_model(tmp_path_factory.mktemp('models') / 'random')}"


@pytest.fixture(scope="module")
def finished(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, dict[str, Any]]:
    """A run of six steps, each evaluated, and its result. Not to be touched."""
    with train(tmp_path_factory.mktemp("best"), *TOY, model, "num_steps=6") as run:
        return run, run.finish(200)


def exported(run_dir: Path, out: Path, *options: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "async_rl", "export", str(run_dir), "--out", str(out), *options]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def highest(result: dict[str, Any]) -> list[float]:
    """[version, accuracy] of the best evaluation of a trained version."""
    return max(result["evals"][1:], key=lambda row: (row[1], row[0]))


def test_the_best_checkpoint_outlives_the_pruning_and_is_what_export_takes(finished, tmp_path: Path) -> None:
    run, result = finished
    assert [version for version, _ in result["evals"]] == list(range(7))
    version, accuracy = highest(result)
    assert len({score for _, score in result["evals"]}) == 7, "every version has answers of its own"
    assert result["best"] == {"version": version, "accuracy": accuracy}
    kept = sorted(p.name for p in (run.run_dir / "checkpoints").glob("step_*"))
    assert kept == sorted({f"step_{version:06d}", "step_000006"})
    card = exported(run.run_dir, tmp_path / "best", "--best")
    assert card["version"] == version and card["heldout_accuracy"] == accuracy
    assert exported(run.run_dir, tmp_path / "newest")["version"] == 6


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_its_best(finished, model: str, tmp_path: Path) -> None:
    """The first life ends after two steps; scores of the toy depend on the life, so the best may be of either."""
    with train(tmp_path, *TOY, model, "num_steps=2") as run:
        first = run.finish(200)["best"]
    with train(tmp_path, *TOY, model, "num_steps=4") as run:
        result = run.finish(200)
    assert first == dict(zip(("version", "accuracy"), highest(finished[1] | {"evals": finished[1]["evals"][:3]}), strict=True))
    assert result["best"]["accuracy"] >= first["accuracy"]
    assert result["best"] == first or result["best"]["version"] > 2
    assert (run.run_dir / "checkpoints" / f"step_{result['best']['version']:06d}").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_ends_well_when_an_evaluation_reaches_the_target(finished, model: str, tmp_path: Path, count: int) -> None:
    later = [row for row in finished[1]["evals"][1:] if row[1] > finished[1]["evals"][0][1]]
    assert later, "some version is better than the first"
    target = later[0][1]
    overrides = ("num_steps=40", f"eval.target={target}", f"rollout.count={count}")
    with train(tmp_path, *TOY, model, *overrides) as run:
        result = run.finish(300)
    version, accuracy = result["evals"][-1]
    assert accuracy >= target > max([a for _, a in result["evals"][:-1]])
    assert result["status"] == "finished" and result["exit_code"] == 0
    steps = result["policy_version"]
    assert steps == result["steps"] < 40 and version <= steps <= version + (count > 1) + 1
    assert result["reason"].startswith(f"held-out accuracy {accuracy:.3f} of version {version} reached eval.target=")
    assert result["reason"].endswith(f"after {steps} of 40 steps")
    assert result["eval_last"] is not None and result["best"] == {"version": version, "accuracy": accuracy}
    assert (run.run_dir / "checkpoints" / f"step_{steps:06d}").is_dir(), "the final checkpoint"
    assert_books_balance(result, trained=4 * steps)


def test_a_new_run_begins_with_an_exported_policy(finished, tmp_path: Path) -> None:
    out = tmp_path / "out"
    exported(finished[0].run_dir, out)
    with safe_open(out / "model.safetensors", "pt") as file:
        before = file.get_tensor("model.norm.weight")
    with train(tmp_path, *TOY, f"model.path={out}", "num_steps=1", "learner.lr=1e-30") as run:
        assert_books_balance(run.finish(200), trained=4)
    exported(run.run_dir, tmp_path / "again")
    with safe_open(tmp_path / "again" / "model.safetensors", "pt") as file:
        assert file.get_tensor("model.norm.weight").equal(before), "with a learning rate of nearly 0"
