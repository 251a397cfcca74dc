"""A Hugging Face model folder, judged by its files: what a copy that broke off, or was made by hand, lacks.

Imports config only; reads headers, never tensors. Invariant: what transformers or vLLM could load is not refused here; whether
the tensors are those of the architecture is for the processes, which have it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rl.config import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit


def check_folder(folder: Path) -> None:
    """Raises ConfigError for a folder without configuration, weights or tokenizer, or with a damaged one of the first two."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path is {folder}, a folder without config.json: give a Hugging Face model folder")
    _object(folder, "config.json")
    files = _weights(folder)
    if not files and not _any(folder, OTHER_WEIGHTS):
        raise ConfigError(f"model.path is {folder}, a folder without weights ({SINGLE}): give a whole copy of the model")
    for file in files:
        if problem := _problem(file):
            raise ConfigError(f"model.path is {folder}, where {file.name} {problem}: give a whole copy of the model")
    if not _any(folder, TOKENIZERS):
        raise ConfigError(
            f"model.path is {folder}, a folder without a tokenizer (tokenizer.json and tokenizer_config.json): "
            "copy these files from the model it was made of"
        )


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Of a safetensors file: where its data begins, and dtype, shape and data_offsets by name. Raises OSError or ValueError."""
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"{file} has a header of {length} bytes")
        header = json.loads(f.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{file} has a header that is no JSON object")
    header.pop("__metadata__", None)
    return 8 + length, header


def _weights(folder: Path) -> list[Path]:
    """The safetensors files that would be loaded, whether they are there or not."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    if not (folder / INDEX).exists():
        return []
    shards = _object(folder, INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ConfigError(f"model.path is {folder}, where {INDEX} has no weight_map: give a whole copy of the model")
    return [folder / name for name in sorted(set(shards.values()))]


def _problem(file: Path) -> str:
    """Why this safetensors file cannot be loaded, or ""."""
    try:
        begin, tensors = read_header(file)
        needed = begin + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
        held = file.stat().st_size
    except FileNotFoundError:
        return f"is missing, which {INDEX} names"
    except OSError as e:
        return f"cannot be read ({e.strerror})"
    except (ValueError, KeyError, IndexError, TypeError):
        return "has no header that can be read"
    return "" if held == needed else f"has {held} bytes instead of the {needed} that its header asks for"


def _object(folder: Path, name: str) -> dict[str, Any]:
    try:
        tree = json.loads((folder / name).read_bytes())
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"model.path is {folder}, where {name} cannot be read ({e}): give a whole copy of the model"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"model.path is {folder}, where {name} is no JSON object: give a whole copy of the model")
    return tree


def _any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))
