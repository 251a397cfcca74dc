"""`async-rl export`: a checkpoint as a Hugging Face folder, for vLLM, transformers, or a further run.

Imports torch and transformers; needs no process group and reads the run's folder only, so a run that is still going is not
disturbed. Invariants: what is exported matched its digests; the folder appears whole or not at all; weights stay float32
unless another type is asked for, and tied ones stay tied.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from async_rl.config import ConfigError, load_config
from async_rl.envs.text import load_tokenizer
from async_rl.learner.checkpoints.best import read_best
from async_rl.learner.checkpoints.checkpoint import checkpoints, problem_of, read_model, step_folder, step_of
from async_rl.learner.update.model import load_hf
from async_rl.observability.files import give_mode_of, read_run_id
from async_rl.observability.sinks import METRICS, read_rows

Which = int | Literal["newest", "best"]
CARD = "async_rl.json"  # in the exported folder: where it comes from


def export(run_dir: Path, out: Path, which: Which, dtype: str) -> dict[str, Any]:
    """Write the checkpoint `which` of the run to `out`; returns what `async_rl.json` in it says.

    Raises ConfigError, LearnerError or TaskError, one sentence, when there is no such checkpoint, it is damaged, `out` exists,
    or the model that the run began with is gone.
    """
    if out.exists():
        raise ConfigError(f"--out is {out}, which exists: name a new folder, or remove that one first")
    folder = find(run_dir / "checkpoints", which)
    config = load_config(run_dir / "config.yaml")
    hf, tokenizer = load_hf(config.model), load_tokenizer(config.model)
    read_model(folder, [(name, parameter.detach()) for name, parameter in hf.named_parameters()])
    hf.to(getattr(torch, dtype))
    card = {
        "run_id": read_run_id(run_dir),
        "version": step_of(folder),
        "config_digest": config.digest(),
        "heldout_accuracy": _accuracy(run_dir, step_of(folder)),
        "dtype": dtype,
    }
    _write(out, hf, tokenizer, card)
    return card


def find(directory: Path, which: Which) -> Path:
    """The folder of that checkpoint, verified. Raises ConfigError."""
    folders = checkpoints(directory)
    if not folders:
        raise ConfigError(f"{directory} holds no checkpoint: let the run save one first (checkpoint.every)")
    if which == "newest":
        return _newest(folders)
    folder = step_folder(directory, _best(directory) if which == "best" else which)
    if folder not in folders:
        steps = ", ".join(str(step_of(f)) for f in folders)
        raise ConfigError(f"--step is {which}, but {directory} holds the checkpoints of steps {steps}: name one of those")
    if problem := problem_of(folder):
        raise ConfigError(f"checkpoint {folder} cannot be used: {problem}; name another with --step")
    return folder


def _newest(folders: list[Path]) -> Path:
    problem = ""
    for folder in reversed(folders):
        problem = problem_of(folder)
        if not problem:
            return folder
    raise ConfigError(f"{folders[0].parent} holds no checkpoint that can be used, the oldest because {problem}")


def _best(directory: Path) -> int:
    best = read_best(directory)
    if best is None:
        raise ConfigError(f"{directory} names no best checkpoint: train with checkpoint.keep_best=true, or give --step")
    return best.version


def _accuracy(run_dir: Path, version: int) -> float | None:
    found = [row.get("eval/accuracy") for row in read_rows(run_dir / METRICS) if row.get("eval/version") == version]
    return found[-1] if found else None


def _write(out: Path, hf: Any, tokenizer: Any, card: dict[str, Any]) -> None:
    draft = out.with_name(f".{out.name}.draft-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        hf.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / CARD).write_text(json.dumps(card, indent=2) + "\n")
        give_mode_of(draft / CARD)
        draft.rename(out)
    except (OSError, SafetensorError, ValueError) as e:  # ValueError: a generation config that contradicts itself
        raise ConfigError(f"--out is {out}, which could not be written: {' '.join(str(e).split())[:200]}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
