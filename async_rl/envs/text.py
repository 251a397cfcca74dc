"""Text to ids, once: the only place that renders or tokenizes a prompt.

Owns: loading a tokenizer, its digest, prompt ids. transformers is imported inside functions, so that launcher and
tests import this module without it.
Invariant: whatever a tokenizer puts before a text (BOS, as a rule) stands there exactly once, with and without a chat
template (BR-031).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config import ModelConfig
from async_rl.envs.base import Message, TaskError

TOKENIZER_FILES = ("*token*.json", "vocab*", "merges.txt", "chat_template*", "*.model", "special_tokens_map.json")


def load_tokenizer(model: ModelConfig) -> Any:
    """The Hugging Face tokenizer of `model.path`; raises TaskError when there is none to load."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except Exception as e:  # the hub client, the file formats and remote code share no base class
        raise TaskError(
            f"no tokenizer could be loaded from model.path={model.path}: {_one_line(e)}; "
            "give a Hugging Face folder or a hub name that holds one"
        ) from e


def tokenizer_digest(model: ModelConfig) -> str:
    """16 hex digits that change with the vocabulary or the chat template; equal wherever the same files are read.

    A folder is digested by its tokenizer files; a hub name by what the loaded tokenizer says of itself.
    """
    digest = hashlib.sha256()
    folder = Path(model.path)
    if folder.is_dir():
        names = {file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
        for file in sorted(names):
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    else:
        tokenizer = load_tokenizer(model)
        content = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, tokenizer.encode("a 1")]
        digest.update(json.dumps(content, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def encode_prompt(tokenizer: Any, prompt: str | Sequence[Message], chat: bool, system: str | None = None) -> np.ndarray:
    """Prompt ids int32 [P]. `chat` wraps a text as one user message and asks for the assistant's turn; messages always go
    through the chat template. `system` becomes a system message before either.

    Raises TaskError when a chat template is needed and the tokenizer has none, or its own refuses the messages.
    """
    if chat or not isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        text = _through_template(tokenizer, messages if system is None else [{"role": "system", "content": system}, *messages])
    else:
        text = prompt
    prefix = _prefix(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    while prefix and ids[: len(prefix)] == prefix:
        ids = ids[len(prefix) :]
    return np.asarray(prefix + ids, dtype=np.int32)


def _through_template(tokenizer: Any, messages: list[Message]) -> str:
    if not tokenizer.chat_template:
        raise TaskError(
            "the prompt is for a chat (data.chat is true, or it is a list of messages), but the model's tokenizer has no chat "
            "template: set data.chat=false with prompts that are texts, or use a model with a template"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as e:  # a template is a program of the model's author
        roles = ", ".join(message["role"] for message in messages)
        raise TaskError(f"the tokenizer's chat template refuses messages of the roles {roles}: {_one_line(e)}") from e


def decoder(tokenizer: Any) -> Callable[[np.ndarray], str]:
    """ids int32 [T] -> text for rewards, special tokens skipped."""
    return lambda ids: tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _prefix(tokenizer: Any) -> list[int]:
    """The ids that this tokenizer puts before any text."""
    bare = tokenizer.encode("1", add_special_tokens=False)
    full = tokenizer.encode("1")
    return next((full[:at] for at in range(len(full)) if full[at : at + len(bare)] == bare), [])


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
