"""Checkpoints are written beside the training: what is copied is what is saved, nothing waits for a disk, failures are told."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import msgpack
import pytest
import torch

from async_rl.learner.checkpoints import checkpoint as module
from async_rl.learner.checkpoints.best import Best, Score
from async_rl.learner.checkpoints.checkpoint import Checkpointer, CheckpointError
from async_rl.learner.checkpoints.saving import Saving
from async_rl.learner.update.gate import Gate
from async_rl.learner.update.optim import policy_tensors

from .learner_cases import make_config, make_policy, make_update
from .training_scene import Training
from .training_scene import make_config as scene_config

torch.set_num_threads(1)


@pytest.fixture
def slow_disk(monkeypatch):
    """Nothing is written before it is set."""
    free, save = threading.Event(), module.save
    monkeypatch.setattr(module, "save", lambda *args, **kwargs: free.wait(20) and save(*args, **kwargs))
    yield free
    free.set()


def test_what_is_saved_is_the_state_at_the_beginning_whatever_training_does_meanwhile(tmp_path: Path, slow_disk) -> None:
    _, optimizer = make_update(make_config(), make_policy())
    live = policy_tensors(optimizer)
    before, saving = {name: tensor.clone() for name, tensor in live.items()}, Saving(Checkpointer(tmp_path, keep=1))
    torch.manual_seed(7)
    rng = torch.get_rng_state()
    saving.begin(3, live, b"state", None)
    assert not saving.done and not saving.wait(0.01)
    torch.rand(3)
    with torch.no_grad():
        for tensor in live.values():
            tensor += 1
    slow_disk.set()
    saving.finish()
    assert Checkpointer(tmp_path, keep=1).load(tmp_path / "step_000003", live) == b"state"
    assert [name for name in live if not torch.equal(live[name], before[name])] == []
    assert torch.equal(torch.get_rng_state(), rng)


def test_what_must_be_on_the_disk_first_fails_the_save_when_it_cannot_be(tmp_path: Path) -> None:
    _, optimizer = make_update(make_config(), make_policy())

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saving = Saving(Checkpointer(tmp_path, keep=1))
    saving.begin(1, policy_tensors(optimizer), b"", full)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1 could not be written .*No space left"):
        saving.finish()
    assert not list(tmp_path.glob("step_*")) and saving.done


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(
    tmp_path: Path, monkeypatch, slow_disk
) -> None:
    config = scene_config(tmp_path, gated=False)
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": 3, "keep": 9})})
    scene = Training(tmp_path, {}, config)
    writing: dict[int, bool] = {}

    def look(version: int) -> None:
        writing[version] = scene.trainer.rank.saving.done

    scene.on_step = {version: lambda version=version: look(version) for version in range(8)}
    threading.Timer(3.0, slow_disk.set).start()
    started = time.monotonic()
    assert scene.train(monkeypatch)[0] == 0
    assert writing[3] is writing[4] is writing[5] is False, "three steps were made beside the first"
    assert time.monotonic() - started >= 3.0, "the second checkpoint waited for the first"
    rows = {row["step"]: row for row in scene.rows()}
    assert rows[5].get("idle/save_s", 0.0) == 0.0 and rows[7]["idle/save_s"] > 1.0
    assert sorted(int(p.name[5:]) for p in (tmp_path / "checkpoints").glob("step_*")) == [3, 6, 8]


def test_a_save_that_failed_is_told_at_a_later_boundary_and_the_run_ends_when_it_repeats(tmp_path: Path, monkeypatch) -> None:
    scene = Training(tmp_path, {}, scene_config(tmp_path, gated=False))

    def full(*args, **kwargs) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.FileSystemWriter, "write_data", full)
    code, status, reason = scene.train(monkeypatch)
    assert (code, status) == (4, "failed")
    assert "3 checkpoints in a row failed (checkpoint.max_failed_saves), the last: checkpoint of step" in reason
    told = [text for text in scene.notices if text.startswith("checkpoint of version")]
    assert [text[:36] for text in told] == [f"checkpoint of version {n} failed ({n} in" for n in (1, 2, 3)]
    assert scene.saver.saved == -1 and not list((tmp_path / "checkpoints").glob("*step*"))


def test_one_failure_is_forgotten_with_the_next_success(tmp_path: Path, monkeypatch) -> None:
    scene, save = Training(tmp_path, {}, scene_config(tmp_path, gated=False)), module.save

    def sometimes(*args, **kwargs):
        if str(kwargs["storage_writer"].path).endswith((".step_000002.partial", ".step_000005.partial")):
            raise CheckpointError("No space left on device")
        return save(*args, **kwargs)

    monkeypatch.setattr(module, "save", sometimes)
    assert scene.train(monkeypatch)[0] == 0
    assert [text[:36] for text in scene.notices if " failed " in text] == [
        f"checkpoint of version {n} failed (1 in" for n in (2, 5)
    ]
    assert (scene.saver.failed, scene.saver.saved) == (0, 8)


def test_a_signal_within_a_step_waits_for_its_end_so_that_the_next_life_goes_on_exactly(tmp_path: Path, monkeypatch) -> None:
    scene = Training(tmp_path, {}, scene_config(tmp_path, gated=False))
    scene.on_step[3] = scene.stop_by_signal
    assert scene.train(monkeypatch) == (143, "stopped", "stopped by SIGTERM; checkpoint of version 4")
    assert [row["step"] for row in scene.rows()] == [1, 2, 3, 4]
    latest = Checkpointer(tmp_path / "checkpoints", keep=1).latest_complete()
    assert latest and latest.name == "step_000004"
    held = msgpack.unpackb((latest / "state.msgpack").read_bytes(), strict_map_key=False)
    assert [record["state"] for record in held["ledger"]["records"] if record["state"] == "taken"] == []


def test_an_evaluation_that_ends_before_its_checkpoint_is_complete_counts_when_it_is(tmp_path: Path) -> None:
    for version in (10, 20):
        (tmp_path / f"step_{version:06d}").mkdir()
    best = Best(tmp_path, None, print)
    best.begin(10, complete=False)
    best.judge(10, 0.5)
    assert best.score is None and best.spared == {10}
    best.written(10, True)
    assert best.score == Score(10, 0.5)
    best.begin(20, complete=False)
    best.judge(20, 0.9)
    best.written(20, False)
    assert best.score == Score(10, 0.5) and best.spared == {10}


def test_a_checkpoint_that_could_not_be_written_is_not_gone_back_to() -> None:
    gate = Gate(make_config({"kl": {"gate": 10.0}}).algorithm.kl)
    for version in (1, 2):
        gate.saved(version)
        gate.measured(1.0, version, 4)
    assert gate.sound == (1, 2)
    gate.lost(2)
    assert gate.sound == (1,)
    gate.measured(1.0, 2, 4)
    assert gate.sound == (1,)
