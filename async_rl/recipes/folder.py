"""Writing a model as a Hugging Face folder, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from async_rl.observability.files import give_mode_of


def write_folder(out: Path, model: Any, tokenizer: Any, recipe: dict[str, Any]) -> None:
    """Model, tokenizer and recipe.json go to a folder beside `out`, which is then renamed; an `out` that exists is replaced."""
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.draft-{os.getpid()}")
    try:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
        give_mode_of(draft / "recipe.json")
        if out.exists():
            shutil.rmtree(out)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
