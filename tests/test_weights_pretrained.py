"""A model with a part missing or misshapen is refused by everybody who would load it; a whole one, tied or not, is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.config import Config, ConfigError, ModelConfig, parse_config
from async_rl.learner.update.model import load_hf
from async_rl.rollout.hf_engine import TransformersEngine
from async_rl.rollout.vllm_engine import VllmEngine
from async_rl.types import WeightName
from async_rl.weights.pretrained import check_whole, load_whole

from .runs import random_model

torch.set_num_threads(1)
LOST = "model.layers.1.self_attn.q_proj.weight"  # vLLM loads it into one tensor with k and v, which hide that it is missing


def settings(folder: Path) -> Config:
    tree: dict[str, Any] = {"num_steps": 1, "groups_per_step": 1, "group_size": 2}
    return parse_config({**tree, "model": {"path": str(folder), "max_model_len": 512}})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return random_model(tmp_path / "random")


def lose(folder: Path, name: str = LOST) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def reshape(folder: Path) -> None:
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | {"intermediate_size": 2 * tree["intermediate_size"]}))


LOADERS: dict[str, Callable[[Config], Any]] = {
    "learner and export": lambda config: load_hf(config.model),
    "eval with transformers": lambda config: TransformersEngine.create(config, WeightName(0, 0)),
    "vLLM, before it starts": lambda config: VllmEngine.create(config, timeout_s=0.001),
}


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_tensor_that_is_missing_is_named(model: Path, load: Callable[[Config], Any]) -> None:
    lose(model)
    with pytest.raises(ConfigError, match=rf"whose files lack 1 of the tensors .* {LOST} first: give a whole copy"):
        load(settings(model))


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_a_tensor_of_another_shape_is_named(model: Path, load: Callable[[Config], Any]) -> None:
    reshape(model)
    with pytest.raises(ConfigError, match=r"tensors have another shape .*down_proj.weight first, \(.*\) instead of \(.*\)"):
        load(settings(model))


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_is_let_through_and_an_untied_head_is_part_of_it(model: Path, tied: bool) -> None:
    config = ModelConfig(path=str(model))
    hf = load_whole(config, dtype=torch.float32)
    if not tied:
        tree = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(tree | {"tie_word_embeddings": False}))
        tensors = load_file(model / "model.safetensors")
        head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        save_file({**tensors, **head}, model / "model.safetensors", metadata={"format": "pt"})
    check_whole(config)
    again = load_whole(config, dtype=torch.float32)
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in hf.state_dict().items())
    if not tied:
        lose(model, "lm_head.weight")
        with pytest.raises(ConfigError, match=r"lm_head\.weight"):
            check_whole(config)


def test_what_cannot_be_read_at_all_is_one_sentence(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be loaded: Error while deserializing header"):
        load_hf(ModelConfig(path=str(model)))
