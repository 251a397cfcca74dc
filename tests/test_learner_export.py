"""Exports: the checkpoint's weights, whole or not at all, and a sentence for whatever is not there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.config import Config, ConfigError, load_config
from async_rl.learner import LearnerError
from async_rl.learner.checkpoints import export as module
from async_rl.learner.checkpoints.checkpoint import Checkpointer
from async_rl.learner.checkpoints.export import Which, export
from async_rl.learner.update.model import PolicyModel, load_policy
from async_rl.learner.update.optim import policy_tensors

from .learner_cases import CPU, make_config, make_update
from .runs import random_model

torch.set_num_threads(1)
IDS = torch.arange(3, 40).unsqueeze(0)


def save(run_dir: Path, config: Config, step: int) -> PolicyModel:
    """A checkpoint of weights that no other step has."""
    policy = load_policy(config, CPU, None)
    torch.manual_seed(step)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    _, optimizer = make_update(config, policy)
    Checkpointer(run_dir / "checkpoints", keep=5).save(step, policy_tensors(optimizer), b"")
    return policy


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, PolicyModel]]:
    """The folder of a run with checkpoints of steps 5 and 10, not to be touched, and their policies."""
    run_dir = tmp_path_factory.mktemp("run")
    config = make_config(model={"path": str(random_model(run_dir / "model")), "max_model_len": 24})
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (run_dir / "run.json").write_text('{"run_id": "r1"}')
    rows = [{"step": 5, "eval/version": 5, "eval/accuracy": 0.25}, {"step": 10, "reward/mean": 1.0}]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir, {step: save(run_dir, config, step) for step in (5, 10)}


@pytest.fixture
def run_dir(made, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    copy = tmp_path / "run"
    shutil.copytree(made[0], copy)
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text().replace(str(made[0]), str(copy)))
    return copy


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.parametrize(("which", "step"), [("newest", 10), (5, 5)])
def test_the_export_computes_the_checkpoints_logits_bit_for_bit(made, tmp_path, which: Which, step: int):
    run_dir, policies = made
    card = export(run_dir, tmp_path / "out", which, "float32")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(policies[step].hf))
    assert not torch.equal(logits(loaded), logits(policies[15 - step].hf))
    assert card == json.loads((tmp_path / "out" / "async_rl.json").read_text())
    assert card == {
        "run_id": "r1",
        "version": step,
        "config_digest": load_config(run_dir / "config.yaml").digest(),
        "heldout_accuracy": 0.25 if step == 5 else None,
        "dtype": "float32",
    }


def test_tied_weights_stay_tied_and_the_tokenizer_keeps_its_chat_template(made, tmp_path):
    export(made[0], tmp_path / "out", "newest", "float32")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (no mapping)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    output = loaded.get_output_embeddings()
    assert output is not None and output.weight is loaded.get_input_embeddings().weight
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", made[0] / "model"))
    assert ours.chat_template == theirs.chat_template
    assert ours.encode("47+38=") == theirs.encode("47+38=")


def test_all_files_may_be_read_by_whom_the_umask_lets(made, tmp_path):
    before = os.umask(0o027)
    try:
        export(made[0], tmp_path / "out", "newest", "float32")
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()} == {
        path.name: "0o640" for path in (tmp_path / "out").iterdir()
    }


def test_bfloat16_is_the_rounded_checkpoint(made, tmp_path):
    export(made[0], tmp_path / "out", 5, "bfloat16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    saved = dict(made[1][5].hf.named_parameters())
    assert all(torch.equal(value, saved[name].bfloat16()) for name, value in loaded.named_parameters())


def test_the_best_is_the_one_that_its_file_names(run_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"names no best checkpoint: train with checkpoint\.keep_best=true"):
        export(run_dir, tmp_path / "out", "best", "float32")
    (run_dir / "checkpoints" / "best").write_text('{"step": 5, "accuracy": 0.25}')
    assert export(run_dir, tmp_path / "out", "best", "float32")["version"] == 5


def test_what_is_not_there_is_a_sentence(run_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"--step is 7, but .* holds the checkpoints of steps 5, 10"):
        export(run_dir, tmp_path / "out", 7, "float32")
    with pytest.raises(ConfigError, match="which exists"):
        export(run_dir, tmp_path, "newest", "float32")
    shutil.rmtree(run_dir / "model")
    with pytest.raises(LearnerError, match=r"no config\.json"):
        export(run_dir, tmp_path / "out", "newest", "float32")
    shutil.rmtree(run_dir / "checkpoints")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        export(run_dir, tmp_path / "out", "newest", "float32")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_damaged_checkpoint_is_passed_over_and_never_exported(run_dir, tmp_path):
    shards = next((run_dir / "checkpoints" / "step_000010").glob("*.distcp"))
    data = bytearray(shards.read_bytes())
    data[len(data) // 2] ^= 1
    shards.write_bytes(data)
    with pytest.raises(ConfigError, match=r"step_000010 cannot be used: .* does not match its digest"):
        export(run_dir, tmp_path / "out", 10, "float32")
    assert export(run_dir, tmp_path / "out", "newest", "float32")["version"] == 5
    shutil.rmtree(run_dir / "checkpoints" / "step_000005")
    with pytest.raises(ConfigError, match="holds no checkpoint that can be used"):
        export(run_dir, tmp_path / "again", "newest", "float32")


def test_a_checkpoint_of_another_model_is_a_sentence(run_dir, tmp_path):
    changed = json.loads((run_dir / "model" / "config.json").read_text()) | {"tie_word_embeddings": False}
    (run_dir / "model" / "config.json").write_text(json.dumps(changed))
    tensors = load_file(run_dir / "model" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, run_dir / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LearnerError, match=r"cannot be read into its model \(model\.lm_head\.weight is in one of the two only"):
        export(run_dir, tmp_path / "out", "newest", "float32")


def test_a_run_that_is_saving_is_left_alone(run_dir, tmp_path):
    unfinished = run_dir / "checkpoints" / ".step_000015.partial"
    unfinished.mkdir()
    assert export(run_dir, tmp_path / "out", "newest", "float32")["version"] == 10
    assert unfinished.is_dir()


def test_a_failed_export_leaves_nothing(made, tmp_path, monkeypatch):
    load = module.load_tokenizer

    def of_full_disk(model):
        tokenizer = load(model)

        def full(path):
            raise OSError(28, "No space left on device")

        tokenizer.save_pretrained = full
        return tokenizer

    monkeypatch.setattr(module, "load_tokenizer", of_full_disk)
    with pytest.raises(ConfigError, match=r"could not be written: .*No space left"):
        export(made[0], tmp_path / "out", "newest", "float32")
    assert list(tmp_path.iterdir()) == []
