"""From a data configuration to prompts: draw or read, split, render, tokenize, drop what cannot be used.

Owns: the held-out rule. Imports config, types, envs/text and the adapters; no torch.
Invariant: whether a prompt is held out depends on it alone, so no seed, no item count and no resume moves it to the other
side; no prompt is on both sides.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from async_rl.config import Config, DataConfig
from async_rl.envs.adapters import jsonl, reasoning_gym
from async_rl.envs.base import Item, TaskError
from async_rl.envs.text import encode_prompt
from async_rl.types import Prompt

CHECK_S = 0.5  # of reading each file before anything starts; the learner reads them whole
REASONS = ("off_options", "unscorable", "repeated", "in_heldout", "too_long")


class Tasks(NamedTuple):
    """`dropped` counts items by reason: off_options, unscorable (no gold answer), repeated, in_heldout (of data.path, and also
    in data.heldout_path), too_long."""

    train: list[Prompt]
    heldout: list[Prompt]
    dropped: dict[str, int]


def is_heldout(key: str, fraction: float) -> bool:
    """True for `fraction` of all keys, by their md5."""
    return int(hashlib.md5(key.encode(), usedforsecurity=False).hexdigest(), 16) % 1000 < fraction * 1000


def build_prompts(config: Config, tokenizer: Any) -> Tasks:
    """All prompts of a run, in the order of their source.

    A prompt that leaves no room for `rollout.max_new_tokens` within `model.max_model_len` is dropped as too_long (BR-073).
    Raises TaskError when the source cannot be read as configured, or a side that is needed stays empty.
    """
    reader = _Reader(config, tokenizer)
    tasks = Tasks([], [], reader.dropped)
    for side, prompt in _split(config, reader):
        (tasks.heldout if side == "heldout" else tasks.train).append(prompt)
    _check_sides(config, tasks)
    return tasks


def _split(config: Config, reader: _Reader) -> Iterator[tuple[str, Prompt]]:
    """("train" or "heldout", prompt), in the order of the source; all of data.heldout_path comes first."""
    data = config.data
    if data.path is None:
        source, items, fraction = data.dataset, reasoning_gym.load_items(data, config.seed), data.heldout_fraction
    else:
        source, items = Path(data.path).stem, jsonl.load_items(data.path, "data.path")
        fraction = data.heldout_fraction if data.heldout_path is None else 0.0
    if data.heldout_path is not None:
        given = jsonl.load_items(data.heldout_path, "data.heldout_path")
        for _, prompt in reader.read(given, Path(data.heldout_path).stem):
            yield "heldout", prompt
        reader.taken = dict.fromkeys(reader.taken, "in_heldout")
    for key, prompt in reader.read(items, source):
        yield "heldout" if is_heldout(key, fraction) else "train", prompt


def examples(data: DataConfig) -> list[tuple[str, list[str]]]:
    """(where, names of the fields that its reward gets) of the first item of each source. Raises TaskError."""
    if data.path is None:
        return [(f"data.dataset {data.dataset}", list(reasoning_gym.EXAMPLE.fields))]
    paths = {"data.path": data.path, "data.heldout_path": data.heldout_path}
    firsts = [next(jsonl.load_items(path, key)) for key, path in paths.items() if path is not None]
    return [(item.where, list(item.fields)) for item in firsts]


def check_sides(config: Config) -> None:
    """Whether both sides of the split of a user's own file get a prompt, as far as that can be told within CHECK_S and without
    a tokenizer, to which no prompt is too long. Raises TaskError as `build_prompts` would."""
    if config.data.path is None:
        return
    reader = _Reader(config, None, deadline_s=time.monotonic() + CHECK_S)
    tasks = Tasks([], [], reader.dropped)
    try:
        for side, prompt in _split(config, reader):
            (tasks.heldout if side == "heldout" else tasks.train).append(prompt)
            if tasks.train and (tasks.heldout or config.eval.draws == 0):
                return
    except _Late:
        return
    _check_sides(config, tasks)


class _Late(Exception):
    """A check has read for as long as a person waits."""


def check_items(data: DataConfig) -> None:
    """Read and render what there is to read without a tokenizer or a library: the lines of each file that is named, as far as
    CHECK_S allows, or else the template of a dataset. Raises TaskError."""
    if data.path is None:
        _render(data, reasoning_gym.EXAMPLE)
        return
    for key in ("path", "heldout_path"):
        path, deadline = getattr(data, key), time.monotonic() + CHECK_S
        for item in jsonl.load_items(path, f"data.{key}") if path is not None else ():
            _render(data, item)
            if time.monotonic() > deadline:
                break


@dataclass
class _Reader:
    """Turns items into prompts, and counts those that cannot be used."""

    config: Config
    tokenizer: Any  # None for a check: then a prompt has no ids
    deadline_s: float = math.inf
    taken: dict[str, str] = field(default_factory=dict)  # identity of each item so far -> why another like it is dropped
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def read(self, items: Iterable[Item], source: str) -> Iterator[tuple[str, Prompt]]:
        """(key, prompt) of each item that can be used; prompts are named after their source and key."""
        config = self.config
        room_tokens = config.model.max_model_len - config.rollout.max_new_tokens
        for item in items:
            if time.monotonic() > self.deadline_s:
                raise _Late
            if item.flaw:
                self.dropped[item.flaw] += 1
                continue
            text = _render(config.data, item)
            identity = _identity(item, text)
            if identity in self.taken:
                self.dropped[self.taken[identity]] += 1
                continue
            self.taken[identity] = "repeated"
            token_ids = self._encode(item, text)
            if len(token_ids) > room_tokens:
                self.dropped["too_long"] += 1
                continue
            key = item.key or identity
            name = hashlib.md5(key.encode(), usedforsecurity=False).hexdigest()[:12]
            yield key, Prompt(f"{source}-{name}", token_ids, text, item.fields)

    def _encode(self, item: Item, text: str) -> np.ndarray:
        data = self.config.data
        if self.tokenizer is None:
            return np.empty(0, dtype=np.int32)
        try:
            return encode_prompt(self.tokenizer, item.messages or text, data.chat, data.system)
        except TaskError as e:
            raise TaskError(f"{item.where}: {e}" if item.where else str(e)) from e


def _identity(item: Item, text: str) -> str:
    """Equal for two items that ask the same; one user message is its text."""
    if not item.messages or (len(item.messages) == 1 and item.messages[0]["role"] == "user"):
        return text
    return json.dumps(item.messages, sort_keys=True, ensure_ascii=False)


def _render(data: DataConfig, item: Item) -> str:
    """What the reward gets as the prompt: the filled template, or the last message."""
    if item.messages:
        if data.prompt is not None:
            raise TaskError(
                f"data.prompt is '{data.prompt}', but {item.where} holds chat messages, which the chat template renders: "
                "leave data.prompt out (data.prompt=null)"
            )
        if data.system is not None and any(message["role"] == "system" for message in item.messages):
            raise TaskError(f"data.system is set, but {item.where} has a system message of its own: leave out one of them")
        return item.messages[-1]["content"]
    template = data.prompt or ("{question}" if data.path is None else "{prompt}")
    try:
        text = template.format(**item.shown)
    except (LookupError, ValueError, AttributeError, TypeError) as e:
        names = " or ".join(f"{{{name}}}" for name in list(item.shown)[:8])
        raise TaskError(
            f"data.prompt is '{template}', which cannot be filled {f'from {item.where} ' * bool(item.where)}"
            f"({type(e).__name__}: {e}): use {names}, and {{{{ }}}} for literal braces"
        ) from e
    if not text.strip():
        raise TaskError(f"data.prompt is '{template}', which is empty for {item.where}: name a field that is not")
    return text


def _check_sides(config: Config, tasks: Tasks) -> None:
    counts = ", ".join(f"{n} {reason}" for reason, n in tasks.dropped.items())
    source = f"num_items={config.data.num_items}" if config.data.path is None else f"path={config.data.path}"
    more = "draw more items" if config.data.path is None else "add lines"
    if not tasks.train:
        raise TaskError(
            f"no training prompt is left of data.{source} ({counts}; {len(tasks.heldout)} held out): "
            f"{_train_advice(tasks)} or {more}"
        )
    if config.eval.draws > 0 and not tasks.heldout:
        raise TaskError(
            f"eval.draws is {config.eval.draws}, but no prompt is held out of {len(tasks.train)} ({counts}): "
            f"raise data.heldout_fraction={config.data.heldout_fraction}, {more}, or set eval.draws=0"
        )


def _train_advice(tasks: Tasks) -> str:
    """What to do about a training side that is empty, by what took most of it."""
    reasons = {**tasks.dropped, "held out": 0 if tasks.dropped["in_heldout"] else len(tasks.heldout)}
    reasons["repeated"] = 0  # it shares the fate of what it repeats
    return {
        "in_heldout": "keep prompts in data.path that data.heldout_path does not hold,",
        "too_long": "raise model.max_model_len, lower rollout.max_new_tokens,",
        "held out": "lower data.heldout_fraction,",
    }.get(max(reasons, key=lambda reason: reasons[reason]), "change data.options or data.prompt,")
