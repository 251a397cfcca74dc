"""Checkpoints on one rank: resume is exact, a broken or half-written one is never used, an older one is never harmed."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.learner import LearnerError
from async_rl.learner.__main__ import _has_critic
from async_rl.learner.checkpoints import checkpoint as module
from async_rl.learner.checkpoints.checkpoint import Checkpointer, CheckpointError, read_model
from async_rl.learner.rank import Rank
from async_rl.learner.update.model import hf_named_parameters
from async_rl.learner.update.optim import policy_tensors
from async_rl.learner.update.steering import Steering
from async_rl.observability import files

from .critic_cases import critic_config, make_critic, make_value_update, targets
from .critic_cases import train as train_critic
from .learner_cases import make_batch, make_config, make_policy, make_update

torch.set_num_threads(1)


def start(seed: int = 0):
    policy = make_policy(seed)
    return policy, *make_update(make_config({"num_minibatches": 2}), policy)


def train(update, steps) -> list[dict[str, float]]:
    return [update.run(make_batch(seed=100 + step), step, Steering(), lambda: None, lambda: None).metrics for step in steps]


def everything(optimizer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in policy_tensors(optimizer).items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2, not to be touched, and what trained them."""
    policy, update, optimizer = start()
    checkpointer = Checkpointer(tmp_path_factory.mktemp("checkpoints"), keep=2)
    for step in (1, 2):
        train(update, [step])
        checkpointer.save(step, policy_tensors(optimizer), f"ledger {step}".encode())
    return checkpointer.directory, policy, optimizer


@pytest.fixture
def saved(trained, tmp_path):
    directory, policy, optimizer = trained
    shutil.copytree(directory, tmp_path / "checkpoints")
    return Checkpointer(tmp_path / "checkpoints", keep=2), policy, optimizer


def test_six_steps_equal_three_a_resume_and_three_bit_for_bit(tmp_path):
    _, update, optimizer = start()
    figures = train(update, range(3))
    saved_rng = torch.get_rng_state()
    folder = Checkpointer(tmp_path, keep=2).save(3, policy_tensors(optimizer), b"the ledger")
    figures += train(update, range(3, 6))

    _, other_update, other_optimizer = start(seed=9)
    torch.manual_seed(12345)
    checkpointer = Checkpointer(tmp_path, keep=2)
    assert checkpointer.latest_complete() == folder
    assert checkpointer.load(folder, policy_tensors(other_optimizer)) == b"the ledger"
    assert torch.equal(torch.get_rng_state(), saved_rng)
    assert train(other_update, range(3, 6)) == figures[3:]
    assert_same(everything(other_optimizer), everything(optimizer))


def test_a_checkpoint_before_the_first_step_loads_too(tmp_path):
    _, _, optimizer = start()
    folder = Checkpointer(tmp_path, keep=1).save(0, policy_tensors(optimizer), None)
    _, _, other_optimizer = start(seed=4)
    assert Checkpointer(tmp_path, keep=1).load(folder, policy_tensors(other_optimizer)) is None
    assert_same(everything(other_optimizer), everything(optimizer))


DAMAGES = ["flip", "truncate", "missing", "manifest", "no manifest", "empty manifest", "no state", "no index", "no shard"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_sentence(saved, damage):
    checkpointer, *_ = saved
    folder = checkpointer.directory / "step_000002"
    shards = next(folder.glob("*.distcp"))
    if damage == "flip":
        data = bytearray(shards.read_bytes())
        data[len(data) // 2] ^= 1
        shards.write_bytes(data)
    elif damage == "truncate":
        os.truncate(shards, shards.stat().st_size - 1)
    elif damage == "missing":
        (folder / "state.msgpack").unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text('{"files": ')
    elif damage == "empty manifest":
        (folder / "manifest.json").write_text('{"files": {}}')
    elif damage.startswith("no ") and damage != "no manifest":
        name = {"no state": "state.msgpack", "no index": ".metadata", "no shard": shards.name}[damage]
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["files"][name]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    else:
        (folder / "manifest.json").unlink()
    assert checkpointer.latest_complete() == checkpointer.directory / "step_000001"
    assert len(checkpointer.skipped) == 1 and checkpointer.skipped[0].startswith("checkpoint of version 2 is skipped: ")


def test_when_none_can_be_used_nothing_starts_over(saved):
    checkpointer, *_ = saved
    for shards in checkpointer.directory.glob("step_*/*.distcp"):
        shards.write_bytes(b"x" + shards.read_bytes()[1:])
    why = r"holds no checkpoint that can be used, the newest \(step_000002\) because \S+\.distcp does not match .*resume=false"
    with pytest.raises(LearnerError, match=why):
        checkpointer.latest_complete()
    assert [sentence[:23] for sentence in checkpointer.skipped] == ["checkpoint of version 2", "checkpoint of version 1"]


def test_an_index_that_is_no_index_is_a_sentence(saved):
    checkpointer, _, optimizer = saved
    folder = checkpointer.directory / "step_000002"
    for content in (b"", b"\x80\x04 no pickle", b"."):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match="does not fit this run"):
            checkpointer.load(folder, policy_tensors(optimizer))


def test_no_checkpoint_is_no_error(tmp_path):
    assert Checkpointer(tmp_path / "none", keep=1).latest_complete() is None


def test_only_the_newest_are_kept_and_latest_names_the_last(saved):
    checkpointer, _, optimizer = saved
    checkpointer.save(3, policy_tensors(optimizer), None)
    assert sorted(p.name for p in checkpointer.directory.iterdir()) == ["latest", "step_000002", "step_000003"]
    assert (checkpointer.directory / "latest").read_text() == "step_000003\n"


def test_going_on_from_an_older_one_removes_those_of_the_lost_timeline_only_after_the_next_is_complete(saved):
    checkpointer, _, optimizer = saved
    (checkpointer.directory / "step_000002" / "manifest.json").unlink()
    again = Checkpointer(checkpointer.directory, keep=1)
    assert again.latest_complete() == checkpointer.directory / "step_000001"
    again.save(1, policy_tensors(optimizer), b"again")
    assert sorted(p.name for p in checkpointer.directory.iterdir()) == ["latest", "step_000001"]
    assert (checkpointer.directory / "step_000001" / "state.msgpack").read_bytes() == b"again"


def fault_at(monkeypatch, place: str) -> None:
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if place == "shards":
        monkeypatch.setattr(module.FileSystemWriter, "write_data", full)
    elif place == "index":
        monkeypatch.setattr(module.FileSystemWriter, "finish", full)
    elif place == "folder":
        monkeypatch.setattr(Path, "mkdir", full)
    elif place == "rename":  # after an older one of the same step was moved aside
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda p, to: full() if p.name.endswith(".partial") else rename(p, to))
    else:
        write = files.write_file
        for where in (module, files):
            monkeypatch.setattr(where, "write_file", lambda path, data: full() if path.name == place else write(path, data))


PLACES = ["folder", "shards", "index", "state.msgpack", "manifest.json", "rename", "latest.new"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [2, 3])
def test_a_disk_that_fills_at_any_write_leaves_older_checkpoints_whole(saved, monkeypatch, place, step):
    checkpointer, _, optimizer = saved
    with monkeypatch.context() as patch:
        fault_at(patch, place)
        with pytest.raises(CheckpointError, match=rf"checkpoint of step {step} could not be written .*No space left"):
            checkpointer.save(step, policy_tensors(optimizer), b"new")
    assert not list(checkpointer.directory.glob(".*.partial"))
    assert (checkpointer.directory / "step_000002").is_dir()
    folder = checkpointer.latest_complete()
    assert folder is not None and folder.name >= "step_000002"
    assert module.problem_of(checkpointer.directory / "step_000001") == ""
    checkpointer.save(4, policy_tensors(optimizer), b"room again")
    assert checkpointer.latest_complete() == checkpointer.directory / "step_000004"


def test_a_file_size_limit_of_the_system_leaves_older_checkpoints_whole(saved):
    checkpointer, _, optimizer = saved
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            checkpointer.save(3, policy_tensors(optimizer), b"new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in checkpointer.directory.iterdir()) == ["latest", "step_000001", "step_000002"]
    assert checkpointer.latest_complete() == checkpointer.directory / "step_000002"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("place", ["shards", "manifest.json", "rename"])
@pytest.mark.parametrize("step", [2, 3])
def test_what_a_killed_save_leaves_behind_is_cleared_and_the_last_good_one_is_found(saved, monkeypatch, place, step):
    checkpointer, _, optimizer = saved
    before = (checkpointer.directory / "step_000002" / "manifest.json").read_bytes()

    def killed(*args, **kwargs):
        raise Killed

    rename = Path.rename
    with monkeypatch.context() as patch:
        if place == "shards":
            patch.setattr(module, "save", killed)
        elif place == "rename":  # after an older one of the same step was moved aside
            patch.setattr(Path, "rename", lambda p, to: killed() if p.name.endswith(".partial") else rename(p, to))
        else:
            patch.setattr(module, "write_file", killed)
        with pytest.raises(Killed):
            checkpointer.save(step, policy_tensors(optimizer), None)
    again = Checkpointer(checkpointer.directory, keep=1)
    assert again.latest_complete() == checkpointer.directory / "step_000002"
    assert (checkpointer.directory / "step_000002" / "manifest.json").read_bytes() == before
    assert sorted(p.name for p in checkpointer.directory.iterdir()) == ["latest", "step_000001", "step_000002"]


@pytest.mark.parametrize("where", ["weights", "moments"])
def test_a_state_that_is_not_finite_is_never_saved(saved, where):
    checkpointer, policy, optimizer = saved
    target = next(policy.parameters()) if where == "weights" else optimizer.named_state()["model.norm.weight.exp_avg"]
    whole = target.detach().clone()
    with torch.no_grad():
        target.view(-1)[3] = torch.nan
    with pytest.raises(CheckpointError, match=r"checkpoint of step 3 is not written: (model|optim)\.\S+ is not finite"):
        checkpointer.save(3, policy_tensors(optimizer), None)
    with torch.no_grad():
        target.copy_(whole)  # what other tests save
    assert checkpointer.latest_complete() == checkpointer.directory / "step_000002"


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(saved):
    checkpointer, *_ = saved
    other = make_policy(hidden_size=32)
    _, optimizer = make_update(make_config(), other)
    with pytest.raises(CheckpointError, match=r"does not fit this run .* use the model it was made from"):
        checkpointer.load(checkpointer.directory / "step_000002", policy_tensors(optimizer))


def test_the_manifest_lists_every_file_with_size_and_digest(saved):
    checkpointer, *_ = saved
    folder = checkpointer.directory / "step_000002"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["step"] == 2 and manifest["num_ranks"] == 1
    assert {p.name for p in folder.iterdir()} == set(manifest["files"]) | {"manifest.json"}
    assert {"bytes", "sha256"} == set(manifest["files"]["state.msgpack"])


def test_a_skipped_step_leaves_the_resumed_run_the_same(tmp_path):
    _, update, optimizer = start()
    train(update, [0])
    before = everything(optimizer)
    batch = make_batch()
    assert update.run(
        dataclasses.replace(batch, mask=np.zeros_like(batch.mask)), 1, Steering(), lambda: None, lambda: None
    ).skipped
    assert_same(everything(optimizer), before)


# With a critic beside the policy.


def both(optimizer, value_update) -> dict[str, torch.Tensor]:
    return policy_tensors(optimizer) | value_update.tensors()


@pytest.fixture
def with_critic(tmp_path):
    """The folder of a checkpoint that holds one, and what it holds."""
    _, update, optimizer = start()
    config, batch = critic_config({"popart": 0.3}), make_batch()
    value_update = make_value_update(config, make_critic())
    value_update.rescale(torch.tensor([1.0, 4.0, 20.0]))
    train(update, [0])
    assert train_critic(value_update, config, batch, *targets(batch))[0] == ""
    tensors = both(optimizer, value_update)
    return Checkpointer(tmp_path, keep=1).save(1, tensors, b""), tensors


def test_policy_and_critic_come_back_together_bit_for_bit(with_critic):
    folder, tensors = with_critic
    _, _, optimizer = start(seed=3)
    value_update = make_value_update(critic_config(), make_critic(seed=3))
    Checkpointer(folder.parent, keep=1).load(folder, both(optimizer, value_update))
    assert_same(both(optimizer, value_update), tensors)
    assert value_update.popart == pytest.approx((1.2, 6.7))
    assert len({key.split(".")[0] for key in tensors}) == 4


def test_a_critic_that_the_run_no_longer_trains_is_left_alone(with_critic):
    folder, tensors = with_critic
    policy, _, optimizer = start(seed=3)
    Checkpointer(folder.parent, keep=1).load(folder, policy_tensors(optimizer))
    assert_same(policy_tensors(optimizer), {key: tensors[key] for key in policy_tensors(optimizer)})
    other = make_policy(seed=4)
    read_model(folder, [(name, p.detach()) for name, p in hf_named_parameters(other)])
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), policy.parameters(), strict=True))


def test_a_checkpoint_without_the_critic_that_the_run_trains_is_refused_in_one_sentence(saved):
    checkpointer, _, optimizer = saved
    value_update = make_value_update(critic_config(), make_critic())
    with pytest.raises(
        CheckpointError, match=r"holds no critic, which algorithm\.advantage asks for .* resume with the advantage"
    ):
        checkpointer.load(checkpointer.directory / "step_000002", both(optimizer, value_update))


def test_a_critic_is_there_before_the_first_step_when_it_was_before_or_is_in_the_checkpoint(saved, with_critic):
    late = {"advantage": "hybrid", "advantage_options": {"critic_start": 0.1, "grpo_end": 0.5}}  # of 20 steps
    configs = {name: make_config(tree) for name, tree in {"no": {}, "all": {"advantage": "gae"}, "late": late}.items()}
    without, held = saved[0].directory, with_critic[0]
    found = {
        (name, at): _has_critic(config, folder)
        for name, config in configs.items()
        for at, folder in ((None, None), (1, without / "step_000001"), (2, without / "step_000002"), ("held", held))
    }
    assert [key for key, there in found.items() if there] == [
        ("all", None),
        ("all", 1),
        ("all", 2),
        ("all", "held"),
        ("late", "held"),
    ]
    assert _has_critic(configs["late"], (without / "step_000002").rename(without / "step_000003")), (
        "one was lost: `load` says so"
    )
    with pytest.raises(CheckpointError, match="cannot be read"):
        _has_critic(configs["late"], without / "step_000000")


@pytest.mark.parametrize("had_critic", [False, True])
def test_a_roll_back_past_the_birth_of_the_critic_gives_it_up(had_critic, tmp_path):
    _, update, optimizer = start()
    update.critic = make_value_update(critic_config(), make_critic())
    checkpointer = Checkpointer(tmp_path, keep=2)
    rank = Rank(update.policy, optimizer, update, None, None, checkpointer, None, None)  # pyright: ignore[reportArgumentType]
    live = rank._tensors() if had_critic else policy_tensors(optimizer)
    saved = {name: value.detach().clone() for name, value in live.items()}
    checkpointer.save(1, live, b"")
    with torch.no_grad():
        for value in rank._tensors().values():
            value += 1
    rank.roll_back(1)
    assert_same(rank._tensors(), saved)
    assert bool(rank.critic) == had_critic
