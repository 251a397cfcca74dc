"""Text to ids, once, with exactly one BOS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from async_rl.config import ModelConfig
from async_rl.envs.base import TaskError
from async_rl.envs.text import decoder, encode_prompt, load_tokenizer, tokenizer_digest
from async_rl.recipes.tokenizer import BOS, EOS, SPECIALS, UNK, VOCAB, character_tokenizer

MESSAGES = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def ids_of(text: str) -> list[int]:
    return [VOCAB[c] for c in text]


@pytest.mark.parametrize("template", ["{{ bos_token }}" + MESSAGES, MESSAGES, "{{ bos_token }}{{ bos_token }}" + MESSAGES])
def test_a_prompt_starts_with_exactly_one_bos_with_and_without_a_template(template: str) -> None:
    tokenizer = character_tokenizer(64)
    tokenizer.chat_template = template
    assert encode_prompt(tokenizer, "1+2=", chat=False).tolist() == [BOS, *ids_of("1+2=")]
    assert encode_prompt(tokenizer, "1+2=", chat=True).tolist() == [BOS, *ids_of("1+2=")]


def test_a_tokenizer_without_bos_gets_none() -> None:
    tokenizer = character_tokenizer(64)
    tokenizer.chat_template = "[" + MESSAGES + "]"
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    assert encode_prompt(tokenizer, "1", chat=False).tolist() == ids_of("1")
    assert encode_prompt(tokenizer, "1", chat=True).tolist() == ids_of("[1]")


def test_a_chat_prompt_without_a_template_is_refused() -> None:
    tokenizer = character_tokenizer(64)
    tokenizer.chat_template = None
    with pytest.raises(TaskError, match=r"data\.chat"):
        encode_prompt(tokenizer, "1", chat=True)


def test_every_printable_character_has_its_own_id_and_survives_a_folder(tmp_path: Path) -> None:
    character_tokenizer(64).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    text = "".join(map(chr, range(32, 127)))
    ids = encode_prompt(tokenizer, text, chat=True)
    assert ids.tolist() == [BOS, *range(len(SPECIALS), len(VOCAB))]
    assert decoder(tokenizer)(np.append(ids, EOS).astype(np.int32)) == text
    assert encode_prompt(tokenizer, "é\n", chat=False).tolist() == [BOS, UNK, UNK]


def test_the_digest_follows_vocabulary_and_template_and_nothing_else(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path))
    tokenizer = character_tokenizer(64)
    tokenizer.save_pretrained(tmp_path)
    first = tokenizer_digest(model)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_digest(model) == first
    tokenizer.chat_template = MESSAGES
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_digest(model) != first


def test_a_folder_without_a_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"^no tokenizer could be loaded from model\.path=") as refused:
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert "\n" not in str(refused.value)


def test_tasks_and_rewards_import_without_torch_vllm_transformers_and_the_task_library() -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'reasoning_gym', 'zmq'}"
    code = (
        f"import sys, async_rl.envs.tasks, async_rl.envs.rewards, async_rl.envs.single_turn; print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
