"""`async-rl eval` with real engines: the figure of an exported policy is the one that its run wrote, exactly."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from .runs import QUICKSTART, ROOT, random_model, train

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(900)]
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


def test_answers_that_did_not_come_in_time_are_told_by_the_exit_code(tmp_path: Path) -> None:
    model = str(random_model(tmp_path / "random"))
    task = ("data.num_items=200", "eval.draws=100000", "eval.timeout_s=2")
    done = command("eval", model, str(QUICKSTART), "--engine", "transformers", *task)
    assert done.returncode == 4 and json.loads(done.stdout.splitlines()[-1])["missing"] > 0
    assert "not answered within eval.timeout_s=2, though the engine is alive: raise eval.timeout_s" in done.stderr


def test_weights_that_are_no_numbers_are_no_wrong_answers(tmp_path: Path) -> None:
    model = random_model(tmp_path / "random")
    tensors = load_file(model / "model.safetensors")
    save_file({n: t.fill_(math.nan) for n, t in tensors.items()}, model / "model.safetensors", metadata={"format": "pt"})
    for engine in ("transformers", "vllm"):
        done = command("eval", str(model), str(QUICKSTART), "--engine", engine, "data.num_items=200", "eval.draws=4")
        assert done.returncode == 4 and done.stdout == ""
        assert done.stderr.splitlines()[-1].startswith(
            "async-rl: none of 4 answers counts, last error: the engine gave log-prob"
        )


def held(pid: int) -> set[str]:
    """Words of the command line of a process."""
    return set(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_signal_ends_it_at_once_without_a_word_too_many_or_a_file_left(tmp_path: Path, engine: str, number: int) -> None:
    """While its modules are imported, and, with vLLM, while the engine starts: to the group, as a terminal sends it."""
    model, temporary = str(random_model(tmp_path / "random")), Path(tempfile.mkdtemp())  # short: sockets lie in it
    argv = [sys.executable, "-m", "async_rl", "eval", model, str(QUICKSTART), "--engine", engine, "data.num_items=200"]
    env = {**os.environ, "TMPDIR": str(temporary)}
    popen = subprocess.Popen(argv, cwd=ROOT, env=env, start_new_session=True, text=True, stdout=-1, stderr=-1)
    ready: dict[str, Callable[[], bool]] = {
        "transformers": lambda: "async_rl.rollout.evaluate" in held(popen.pid),
        "vllm": lambda: any(temporary.glob("arl-*/*")),
    }
    try:
        deadline = time.monotonic() + 200
        while not ready[engine]():
            assert popen.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        os.killpg(popen.pid, number)
        out, err = popen.communicate(timeout=30)
    finally:
        if popen.poll() is None:
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait(10)
    assert (popen.returncode, out) == (128 + number, "")
    assert "Traceback" not in err and "async-rl" not in err
    left = list(temporary.glob("arl-*"))
    shutil.rmtree(temporary)
    assert left == []
