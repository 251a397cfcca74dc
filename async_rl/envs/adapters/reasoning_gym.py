"""Items out of the reasoning-gym generators.

Owns: the mapping of `data.dataset` and `data.options` to that library, and its traps. The library (two seconds of
imports) is imported inside functions.
Invariant: two seeds draw from ranges of generator seeds that do not overlap.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import Any

from async_rl.config import DataConfig
from async_rl.envs.base import Item, TaskError

SEED_STRIDE = 10_000_019
"""Item i of a dataset is drawn from Random(seed + i), so neighboring seeds share nearly all their items."""

NOISE = re.compile(r"[A-Za-z_]+|\s+|[?!:;,'\"]|\.(?!\d)")

OURS = {"seed": "the top-level seed", "size": "data.num_items"}


def load_items(data: DataConfig, seed: int) -> list[Item]:
    """`data.num_items` items in the generator's order, repeats included; raises TaskError for an unknown dataset or option."""
    dataset = _dataset(data, (seed * SEED_STRIDE) % 2**31)
    items: list[Item] = []
    try:
        for index in range(data.num_items):
            raw = dataset[index]
            items.append(_item(data, str(raw["question"]), raw.get("answer")))
    except Exception as e:  # any of a hundred generators, any error
        raise TaskError(
            f"reasoning-gym's '{data.dataset}' failed on item {len(items)} with data.options={data.options}: "
            f"{type(e).__name__}: {e}; change the options"
        ) from e
    return items


def expression_of(question: str) -> str:
    """The question without words, spaces and punctuation: "Calculate 47 + 38." -> "47+38"."""
    return NOISE.sub("", question)


def _item(data: DataConfig, question: str, answer: Any) -> Item:
    gold = "" if answer is None else str(answer)
    return Item(
        shown={"question": question, "expression": expression_of(question)},
        fields={"target": gold, "question": question},
        key=question,
        flaw="off_options" if _off_digits(data, question) else "" if gold.strip() else "unscorable",
    )


EXAMPLE = Item(shown={"question": "What is 1 + 2?", "expression": "1+2"}, fields={"target": "", "question": ""})
"""What every item has to show and gives the reward, whatever the dataset."""


def _dataset(data: DataConfig, seed: int) -> Any:
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    if data.dataset not in DATASETS:
        near = difflib.get_close_matches(data.dataset, DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else "see reasoning-gym's list of datasets"
        raise TaskError(f"data.dataset is '{data.dataset}', which reasoning-gym does not have: {hint}")
    known = [f.name for f in dataclasses.fields(DATASETS[data.dataset][1]) if f.name not in OURS]
    for key in data.options:
        if key in OURS:
            raise TaskError(f"data.options.{key} is set by the system: use {OURS[key]} instead")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1) or known
            raise TaskError(f"data.options.{key} is no option of '{data.dataset}': did you mean {' or '.join(near)}?")
    _check_division(data)
    try:
        return create_dataset(data.dataset, seed=seed, size=data.num_items, **data.options)
    except (AssertionError, TypeError, ValueError) as e:
        raise TaskError(f"data.options={data.options} is refused by reasoning-gym's '{data.dataset}': {e}") from e


def _off_digits(data: DataConfig, question: str) -> bool:
    """To this generator d digits mean 0..10^d: asked for two, it also gives 7 and 100."""
    if data.dataset != "basic_arithmetic" or not {"min_digits", "max_digits"} <= data.options.keys():
        return False
    lengths = [len(number) for number in re.findall(r"\d+", question)]
    return any(not data.options["min_digits"] <= length <= data.options["max_digits"] for length in lengths)


def _check_division(data: DataConfig) -> None:
    """Without parentheses this generator divides by another number than the one it prints: '5 / 9' has the answer 10."""
    options = data.options
    if (
        data.dataset == "basic_arithmetic"
        and options.get("allow_parentheses") is False
        and "/" in options.get("operators", "/")
    ):
        raise TaskError(
            "data.options.operators of 'basic_arithmetic' holds '/' with allow_parentheses=false, where the library's answers "
            "do not fit its questions: leave '/' out, for example operators: ['+', '-']"
        )
