"""The answers of evaluations in files that a person can read, whatever the disk does."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_rl.data.evaluation import Evaluation
from async_rl.learner.report import samples
from async_rl.learner.report.samples import Samples
from async_rl.types import WeightName

from .ledger_samples import make_prompt, make_trajectory


def evaluated(version: int = 20) -> Evaluation:
    evaluation = Evaluation([make_prompt(7)], 3, 0, WeightName(1, version), 60.0)
    while (lease := evaluation.next_lease()) is not None:
        index = lease[0] & 3
        reward = (1.0, math.nan, 0.5)[index]
        answer = dataclasses.replace(make_trajectory([version] * 2), reward=reward, error="" if index != 1 else "it raised")
        evaluation.deliver(
            lease[0], index != 2, reward, dataclasses.replace(answer, scores={"length": 2.0} if index == 0 else {})
        )
    return evaluation


def decode(ids: np.ndarray) -> str:
    return "é\n" + "".join(map(str, ids.tolist()))


def opened(folder: Path, resume_step: int | None = None, decode: Any = decode) -> tuple[Samples, list[str]]:
    notices: list[str] = []
    return Samples(folder, resume_step, decode, notices.append), notices


def test_each_answer_is_one_object_with_what_a_reader_needs(tmp_path: Path) -> None:
    writer, notices = opened(tmp_path / "samples")
    writer.write(evaluated())
    writer.close()
    (path,) = (tmp_path / "samples").iterdir()
    assert path.name == "eval_000020.jsonl" and notices == []
    first, second, third = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert first == {
        "version": 20,
        "prompt_id": "p7",
        "prompt": "prompt 7",
        "answer": "é\n01",
        "reward": 1.0,
        "scores": {"length": 2.0},
        "error": "",
        "finish_reason": "stop",
        "num_tokens": 2,
    }
    assert (second["reward"], second["error"]) == (None, "it raised")
    assert (third["reward"], third["error"]) == (0.5, "not sampled by version 20 alone")


def test_a_resumed_run_loses_the_files_of_versions_it_has_not_made(tmp_path: Path) -> None:
    for name in ("eval_000000.jsonl", "eval_000020.jsonl", "eval_000040.jsonl", "mine.txt", "eval_notes.jsonl"):
        (tmp_path / name).touch()
    opened(tmp_path, resume_step=20)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "eval_000000.jsonl", "eval_000020.jsonl", "eval_notes.jsonl", "mine.txt",
    ]  # fmt: skip
    opened(tmp_path, resume_step=None)
    assert len(list(tmp_path.iterdir())) == 4, "whoever begins a new run has moved the folder aside"


def test_trouble_with_the_disk_or_the_tokenizer_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer, notices = opened(tmp_path / "file")
    writer.write(evaluated())
    writer.close()
    assert len(notices) == 1 and "could not be written" in notices[0] and "the run goes on" in notices[0]

    (tmp_path / "small").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        writer, notices = opened(tmp_path / "small")
        writer.write(evaluated())
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(notices) == 1 and "File too large" in notices[0] and list((tmp_path / "small").iterdir()) == []

    def broken(ids: np.ndarray) -> str:
        raise OverflowError("id")

    writer, notices = opened(tmp_path / "samples", decode=broken)
    writer.write(evaluated())
    writer.close()
    assert notices == ["the answers of version 20 could not be written: OverflowError: id"]
    assert list((tmp_path / "samples").glob("*.jsonl")) == []


def test_nobody_waits_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "CLOSE_S", 0.05)
    thaw = threading.Event()

    def stuck(ids: np.ndarray) -> str:
        thaw.wait(20)
        return ""

    writer, notices = opened(tmp_path, decode=stuck)
    writer.write(evaluated(20))
    writer.write(evaluated(40))
    writer.close()
    assert "version 40 are not written" in notices[0] and "not written within" in notices[1]
    thaw.set()
    monkeypatch.setattr(samples, "CLOSE_S", 20.0)
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["eval_000020.jsonl"]
