"""From a data configuration to prompts: the split, the drops, and what a user is told."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from async_rl.config import Config, DataConfig, parse_config
from async_rl.envs.adapters import reasoning_gym
from async_rl.envs.adapters.reasoning_gym import expression_of, load_items
from async_rl.envs.base import Item, TaskError
from async_rl.envs.tasks import build_prompts, is_heldout

ADDITION = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2, "operators": ["+"], "allow_parentheses": False}


class Characters:
    """A tokenizer of one id per character, with a BOS of id 0."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(c) for c in text]


def config(**changes: Any) -> Config:
    tree: dict[str, Any] = {
        "num_steps": 1,
        "groups_per_step": 1,
        "group_size": 2,
        "model": {"path": "x", "max_model_len": 64},
        "rollout": {"max_new_tokens": 8},
        "data": {"options": {**ADDITION, "allow_negation": False}, "num_items": 300, "prompt": "{expression}="},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return parse_config(tree)


def items_are(monkeypatch: pytest.MonkeyPatch, *items: Item) -> None:
    monkeypatch.setattr(reasoning_gym, "load_items", lambda data, seed: list(items))


def item(question: str, answer: str = "1") -> Item:
    return reasoning_gym._item(DataConfig(), question, answer)


def questions(prompts: list[Any]) -> set[str]:
    return {p.fields["question"] for p in prompts}


def test_prompts_are_the_bare_expression_with_one_bos_and_the_gold_answer() -> None:
    built = build_prompts(config(), Characters())
    for prompt in built.train + built.heldout:
        a, b = map(int, prompt.text.removesuffix("=").split("+"))
        assert prompt.fields == {"target": str(a + b), "question": f"Calculate {a} + {b}."}
        assert prompt.token_ids.tolist() == [0, *map(ord, prompt.text)]
        assert prompt.token_ids.dtype.name == "int32"


def test_a_question_is_held_out_by_its_hash_whatever_the_seed() -> None:
    by_seed = [build_prompts(config(seed=seed), Characters()) for seed in (0, 1)]
    train = questions(by_seed[0].train) | questions(by_seed[1].train)
    heldout = questions(by_seed[0].heldout) | questions(by_seed[1].heldout)
    assert len(heldout) > 30
    assert train.isdisjoint(heldout)
    for question in heldout:
        assert int(hashlib.md5(question.encode()).hexdigest(), 16) % 1000 < 100


def test_the_held_out_share_is_the_configured_one() -> None:
    for fraction in (0.0, 0.1, 0.5):
        assert sum(is_heldout(f"q{i}", fraction) for i in range(5000)) / 5000 == pytest.approx(fraction, abs=0.02)


def test_neighboring_seeds_share_few_questions() -> None:
    first, second = ({i.key for i in load_items(config().data, seed)} for seed in (1, 2))
    assert len(first & second) < 30


def test_the_same_seed_gives_the_same_prompts_in_the_same_order() -> None:
    first, second = (build_prompts(config(seed=3), Characters()) for _ in range(2))
    assert [p.prompt_id for p in first.train] == [p.prompt_id for p in second.train]
    assert len({p.prompt_id for p in first.train + first.heldout}) == len(first.train) + len(first.heldout)


def test_every_item_is_a_prompt_or_is_counted_as_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    items_are(
        monkeypatch,
        *(item(str(10**n)) for n in range(9)),
        item("7", ""),
        item("8", " "),
        item("1"),
        item("x" * 60),
    )
    built = build_prompts(config(data__prompt="{question}", data__heldout_fraction=0.0, eval__draws=0), Characters())
    assert built.dropped == {"off_options": 0, "repeated": 1, "unscorable": 2, "in_heldout": 0, "too_long": 1}
    assert len(built.train) == 9


def test_a_prompt_that_just_leaves_room_for_an_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    items_are(monkeypatch, *(item("1" * n) for n in (30, 31, 32, 500)))
    small = {"model__max_model_len": 32, "rollout__max_new_tokens": 1, "eval__draws": 0}
    built = build_prompts(config(data__prompt="{question}", data__heldout_fraction=0.0, **small), Characters())
    assert [len(p.token_ids) for p in built.train] == [31]
    assert built.dropped["too_long"] == 3


def test_two_questions_with_one_text_never_sit_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    wordings = [f"{word} 1 + {n}" for n in range(50) for word in ("Add", "Sum", "Solve", "Find")]
    items_are(monkeypatch, *(item(q) for q in wordings))
    built = build_prompts(config(data__heldout_fraction=0.5), Characters())
    assert {p.text for p in built.train}.isdisjoint(p.text for p in built.heldout)
    assert built.dropped["repeated"] == 150


@pytest.mark.parametrize(
    ("question", "expression"),
    [
        ("Calculate 47 + 38.", "47+38"),
        ("What is -3 * (4 - 2)?", "-3*(4-2)"),
        ("Evaluate: 3.5 + 1,000", "3.5+1000"),
    ],
)
def test_an_expression_is_the_question_without_words_spaces_and_punctuation(question: str, expression: str) -> None:
    assert expression_of(question) == expression


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data__dataset": "basic_aritmetic"}, "did you mean basic_arithmetic"),
        ({"data__dataset": "zzz"}, "list of datasets"),
        ({"data__options": {"max_term": 3}}, "did you mean max_terms"),
        ({"data__options": {"seed": 3}}, "top-level seed"),
        ({"data__options": {"size": 3}}, "data.num_items"),
        ({"data__options": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"data__options": {"min_terms": "two"}}, "refused"),
        ({"data__options": {"allow_parentheses": False}}, "leave '/' out"),
        ({"data__prompt": "{queston}="}, "'queston'"),
        ({"data__prompt": "{"}, "{question} or {expression}"),
        ({"data__chat": True}, "no chat template"),
        ({"rollout__max_new_tokens": 63}, "no training prompt is left"),
        ({"data__heldout_fraction": 0.0001, "data__num_items": 20}, "eval.draws"),
    ],
)
def test_a_task_that_cannot_be_built_is_explained_in_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError) as refused:
        build_prompts(config(**changes), Characters())
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_numbers_of_other_lengths_than_the_options_ask_for_are_left_out_and_counted() -> None:
    built = build_prompts(config(), Characters())
    assert built.dropped["off_options"] > 0
    assert all(len(prompt.text) == len("47+38=") for prompt in (*built.train, *built.heldout))
