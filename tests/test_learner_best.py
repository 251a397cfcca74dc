"""The best checkpoint: which it is, that pruning spares it, and that it is forgotten with its timeline."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from async_rl.learner.checkpoints import best as module
from async_rl.learner.checkpoints.best import Best, Score, read_best
from async_rl.learner.checkpoints.checkpoint import Checkpointer, CheckpointError
from async_rl.learner.update.optim import policy_tensors

from .learner_cases import make_config, make_policy, make_update

torch.set_num_threads(1)


def folder(tmp_path: Path, *steps: int) -> Path:
    for step in steps:
        (tmp_path / f"step_{step:06d}").mkdir()
    return tmp_path


def judged(directory: Path, *scores: tuple[int, float | None], resumed: int | None = None) -> tuple[Best, list[str]]:
    said: list[str] = []
    best = Best(directory, resumed, said.append)
    for version, accuracy in scores:
        best.begin(version)
        best.judge(version, accuracy)
    return best, said


def test_the_highest_score_is_named_and_a_tie_goes_to_the_newer(tmp_path):
    directory = folder(tmp_path, 10, 20, 30, 40)
    assert judged(directory, (10, 0.5), (20, 0.7), (30, 0.7), (40, 0.6))[0].score == Score(30, 0.7)
    assert json.loads((directory / "best").read_text()) == {"step": 30, "accuracy": 0.7}
    assert read_best(directory) == Score(30, 0.7)


def test_an_evaluation_that_does_not_count_or_has_no_checkpoint_changes_nothing(tmp_path):
    best, _ = judged(folder(tmp_path, 10, 20), (10, 0.5), (20, None))
    best.judge(30, 0.9)
    assert best.score == Score(10, 0.5)


def test_pruning_spares_the_best_and_the_one_under_evaluation(tmp_path):
    policy = make_policy()
    _, optimizer = make_update(make_config(), policy)
    checkpointer, best = Checkpointer(tmp_path, keep=1), Best(tmp_path, None, print)
    for step, accuracy in ((1, 0.9), (2, 0.1), (3, None), (4, None)):
        checkpointer.spared = best.spared
        checkpointer.save(step, policy_tensors(optimizer), None)
        if accuracy is not None:
            best.begin(step)
            best.judge(step, accuracy)
        elif step == 3:
            best.begin(step)
    assert [p.name for p in sorted(tmp_path.glob("step_*"))] == ["step_000001", "step_000003", "step_000004"]
    best.judge(3, 0.95)
    checkpointer.spared = best.spared
    checkpointer.save(5, policy_tensors(optimizer), None)
    assert [p.name for p in sorted(tmp_path.glob("step_*"))] == ["step_000003", "step_000005"]


def test_a_resumed_run_remembers_the_best(tmp_path):
    judged(folder(tmp_path, 10, 20, 30), (10, 0.8))
    best, said = judged(tmp_path, (30, 0.7), resumed=20)
    assert best.score == Score(10, 0.8) and best.spared == {10} and said == []


@pytest.mark.parametrize(("resumed", "whence"), [(9, "goes on from version 9"), (None, "begins anew")])
def test_a_best_of_a_timeline_that_was_lost_is_forgotten(tmp_path, resumed, whence):
    judged(folder(tmp_path, 9, 10), (10, 0.8))
    best, said = judged(tmp_path, resumed=resumed)
    assert best.score is None and read_best(tmp_path) is None
    assert len(said) == 1 and whence in said[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": "x", "accuracy": 1}', '{"step": 7, "accuracy": 0.5}'])
def test_a_damaged_file_is_a_sentence_and_not_the_end_of_the_run(tmp_path, content):
    (folder(tmp_path, 10) / "best").write_text(content)
    with pytest.raises(CheckpointError, match=r"best (cannot be read|names step 7 .* not there)"):
        read_best(tmp_path)
    best, said = judged(tmp_path, (10, 0.5), resumed=10)
    assert len(said) == 1 and "looked for anew" in said[0]
    assert best.score == read_best(tmp_path) == Score(10, 0.5)


def test_a_full_disk_is_a_sentence_and_leaves_the_older_name(tmp_path, monkeypatch):
    best, said = judged(folder(tmp_path, 10, 20), (10, 0.5))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "replace_file", full)
    best.begin(20)
    best.judge(20, 0.6)
    assert len(said) == 1 and "could not be written (No space left on device)" in said[0]
    assert read_best(tmp_path) == Score(10, 0.5) == best.score
