"""The Hugging Face model of a folder or hub name, whole or not at all; `key` is the one that names it to the user.

Imports transformers and config; only torch and transformers read weights here. Invariant: no tensor of a model that is handed
out, or found whole, is made up: transformers and vLLM both fill what a folder lacks with whatever was there.
"""

from __future__ import annotations

from typing import Any

import transformers

from async_rl.config import ConfigError, ModelConfig


def load_whole(config: ModelConfig, key: str = "model.path", **options: Any) -> transformers.PreTrainedModel:
    """The model with every tensor that its architecture has; `options` go to `from_pretrained`. Raises ConfigError."""
    try:
        model, found = _load(config, **options)
    except Exception as e:  # the hub client, the file formats, a config's own checks and remote code share no base class
        raise ConfigError(f"{key} is {config.path}, which cannot be loaded: {_one_line(e)}") from None
    _refuse_parts(key, config.path, found)
    return model


def check_whole(config: ModelConfig) -> None:
    """Raises ConfigError when a tensor is missing or of another shape; reads headers only, and makes no tensor."""
    try:
        _, found = _load(config, device_map="meta")
    except Exception:  # what transformers cannot load, vLLM may; and it says by itself when it cannot
        return
    _refuse_parts("model.path", config.path, found)


def _load(config: ModelConfig, **options: Any) -> tuple[transformers.PreTrainedModel, dict[str, Any]]:
    logging = transformers.utils.logging
    logging.disable_progress_bar()
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # its table of what is missing: a sentence says it
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            config.path,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused by name below
            **options,
        )
        return loaded
    finally:
        logging.set_verbosity(before)


def _refuse_parts(key: str, path: str, found: dict[str, Any]) -> None:
    """Tied weights are not among the missing: transformers knows where they come from."""
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(
            f"{key} is {path}, whose files lack {len(missing)} of the tensors that its config.json asks for, "
            f"{missing[0]} first: give a whole copy of the model"
        )
    if mismatched := sorted(found["mismatched_keys"], key=lambda entry: str(entry[0])):
        name, held, wanted = mismatched[0]
        raise ConfigError(
            f"{key} is {path}, where {len(mismatched)} tensors have another shape than its config.json asks for, "
            f"{name} first, {tuple(held)} instead of {tuple(wanted)}: give a whole copy of the model"
        )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
