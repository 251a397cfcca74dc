"""A user's own data: what a line may be, what becomes of it, and what each mistake says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config, parse_config
from async_rl.envs.adapters.jsonl import MAX_LINE_BYTES, load_items
from async_rl.envs.base import Item, TaskError
from async_rl.envs.tasks import Tasks, build_prompts, check_items, check_sides, is_heldout
from async_rl.recipes.tokenizer import BOS, VOCAB, character_tokenizer

USER = {"role": "user", "content": "1+2="}
TURNS = [USER, {"role": "assistant", "content": "3"}, {"role": "user", "content": "and 4+5="}]


def write(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def config(**data: Any) -> Config:
    sizes = {"num_steps": 1, "groups_per_step": 1, "group_size": 2, "rollout": {"max_new_tokens": 8}}
    model = {"path": "x", "max_model_len": 64}
    return parse_config({**sizes, "model": model, "eval": {"draws": 0}, "data": {"heldout_fraction": 0.0, **data}})


def built(path: Path, *lines: Any, **data: Any) -> Tasks:
    return build_prompts(config(path=write(path / "sums.jsonl", *lines), **data), character_tokenizer(64))


def items(path: Path, *lines: Any) -> list[Item]:
    return list(load_items(write(path / "sums.jsonl", *lines), "data.path"))


def ids_of(text: str) -> list[int]:
    return [BOS, *(VOCAB[c] for c in text)]


def test_a_line_becomes_a_prompt_and_its_other_fields_go_to_the_reward(tmp_path: Path) -> None:
    tasks = built(tmp_path, {"prompt": "1+2=", "answer": 3, "level": [1, {"a": None}]})
    (prompt,) = tasks.train
    assert (prompt.text, prompt.token_ids.tolist()) == ("1+2=", ids_of("1+2="))
    assert prompt.fields == {"target": 3, "level": [1, {"a": None}]}
    assert prompt.prompt_id.startswith("sums-")


def test_a_template_is_filled_from_any_field_and_needs_no_prompt(tmp_path: Path) -> None:
    tasks = built(tmp_path, {"a": 1, "b": 2, "answer": 3}, {"a": 4, "b": 5, "answer": 9}, prompt="{a}+{b}=")
    assert [p.text for p in tasks.train] == ["1+2=", "4+5="]
    assert tasks.train[0].fields == {"a": 1, "b": 2, "target": 3}


def test_messages_go_through_the_chat_template_and_the_reward_sees_the_last_and_all(tmp_path: Path) -> None:
    tasks = built(tmp_path, {"prompt": TURNS, "answer": "9"})
    (prompt,) = tasks.train
    assert prompt.token_ids.tolist() == ids_of("1+2=3and 4+5=")
    assert prompt.text == "and 4+5="
    assert prompt.fields == {"target": "9", "messages": TURNS}


def test_conversations_are_told_apart_by_all_their_messages(tmp_path: Path) -> None:
    other = [{"role": "user", "content": "hello"}, *TURNS[1:]]
    tasks = built(tmp_path, {"prompt": TURNS}, {"prompt": other}, {"prompt": TURNS, "level": 2}, {"prompt": "and 4+5="})
    assert len({p.prompt_id for p in tasks.train}) == len(tasks.train) == 3
    assert tasks.dropped["repeated"] == 1


def test_a_system_message_goes_before_texts_and_messages_alike(tmp_path: Path) -> None:
    tasks = built(tmp_path, {"prompt": "7+8="}, {"prompt": TURNS}, chat=True, system="Add.")
    assert [p.token_ids.tolist() for p in tasks.train] == [ids_of("Add.7+8="), ids_of("Add.1+2=3and 4+5=")]
    assert [p.text for p in tasks.train] == ["7+8=", "and 4+5="]


def test_byte_order_mark_blank_lines_windows_lines_and_odd_separators_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes('\ufeff{"prompt": "a"}\r\n\r\n  \n{"prompt": "b\u2028c"}\r\n{"prompt": "d"}'.encode())
    assert [item.shown["prompt"] for item in load_items(str(path), "data.path")] == ["a", "b\u2028c", "d"]


def test_prompts_are_held_out_by_their_hash_and_repeats_are_counted(tmp_path: Path) -> None:
    lines = [{"prompt": f"{i}+{i}="} for i in range(200)]
    tasks = built(tmp_path, *lines, *lines[:5], {"prompt": "9" * 60}, heldout_fraction=0.2)
    again = built(tmp_path, *reversed(lines), heldout_fraction=0.2)
    assert {p.text for p in tasks.heldout} == {p.text for p in again.heldout}
    assert 20 <= len(tasks.heldout) <= 60 and len(tasks.train) + len(tasks.heldout) == 200
    assert tasks.dropped == {"off_options": 0, "unscorable": 0, "repeated": 5, "in_heldout": 0, "too_long": 1}


def test_a_held_out_file_is_held_out_whole_and_its_prompts_leave_the_training_file(tmp_path: Path) -> None:
    lines = [{"prompt": f"{i}+{i}="} for i in range(20)]
    shared = [lines[3], {"prompt": [{"role": "user", "content": "4+4="}]}, {"prompt": "extra"}, {"prompt": "extra"}]
    heldout = write(tmp_path / "other.jsonl", *shared)
    tasks = built(tmp_path, *lines, *lines[2:4], heldout_path=heldout, heldout_fraction=0.5)
    assert [p.text for p in tasks.heldout] == ["3+3=", "4+4=", "extra"]
    assert {p.text for p in tasks.train}.isdisjoint(p.text for p in tasks.heldout) and len(tasks.train) == 18
    assert (tasks.dropped["in_heldout"], tasks.dropped["repeated"]) == (3, 2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{'prompt': 1}", "is not JSON"),
        ("[1]", "holds a JSON list"),
        ("7", "holds a JSON int"),
        ({"prompt": " \n"}, "has an empty `prompt`"),
        ({"prompt": None}, "a `prompt` that is a NoneType"),
        ({"prompt": 7}, "a `prompt` that is a int"),
        ({"prompt": "a", "answer": 1, "target": 2}, "both `answer` and `target`"),
        ('{"prompt": "a", "x": NaN}', "the number NaN"),
        ('{"prompt": "a", "x": [-Infinity]}', "the number -Infinity"),
        ('{"prompt": "a", "x": 1e999}', "the number 1e999"),
        ('{"prompt": "a", "x": 18446744073709551616}', "more than 64 bits"),
        (f'{{"prompt": "a", "x": {"9" * 5000}}}', "more than 64 bits"),
        ('{"prompt": "\\ud800"}', "not valid UTF-8"),
        ("[" * 100_000, "is not JSON"),
        ({"prompt": "a" * (MAX_LINE_BYTES + 1)}, "over the limit"),
        ({"prompt": []}, "empty `prompt`"),
        ({"prompt": ["a"]}, 'is not {"role": ..., "content": text}: "a"'),
        ({"prompt": [{"role": "user"}]}, 'is not {"role": ..., "content": text}'),
        ({"prompt": [{**USER, "name": "x"}]}, 'is not {"role": ..., "content": text}'),
        ({"prompt": [{"role": "user", "content": None}]}, 'is not {"role": ..., "content": text}'),
        ({"prompt": [{"role": "human", "content": "a"}]}, 'the role "human"'),
        ({"prompt": [USER, {"role": "assistant", "content": "3"}]}, "ends with a message of the assistant"),
        ({"prompt": [{"role": "user", "content": ""}]}, "its last message must say something"),
        ({"prompt": [USER], "messages": []}, "has a field `messages`"),
    ],
)
def test_a_mistake_is_one_sentence_with_file_and_line(line: Any, says: str, tmp_path: Path) -> None:
    assert len(items(tmp_path, {"prompt": "fine", "x": 2**64 - 1})) == 1
    with pytest.raises(TaskError) as refused:
        items(tmp_path, {"prompt": "fine"}, "", line)
    sentence = str(refused.value)
    assert sentence.startswith(f"{tmp_path / 'sums.jsonl'}:3 ") and says in sentence
    assert "\n" not in sentence and len(sentence) < 400


@pytest.mark.parametrize(
    ("line", "data", "says"),
    [
        ({"question": "a"}, {}, "data.prompt is '{prompt}', which cannot be filled from {file}:1 (KeyError: 'prompt')"),
        ({"prompt": "a"}, {"prompt": "{question}"}, "cannot be filled from {file}:1 (KeyError: 'question'): use {prompt}"),
        ({"prompt": "a", "x": ""}, {"prompt": "{x}"}, "is empty for {file}:1"),
        ({"prompt": [USER]}, {"prompt": "{prompt}"}, "{file}:1 holds chat messages"),
        (
            {"prompt": [{"role": "system", "content": "Add."}, USER]},
            {"system": "Add.", "chat": True},
            "{file}:1 has a system message of its own",
        ),
    ],
)
def test_what_does_not_fit_the_configuration_is_seen_in_the_first_line(
    line: Any, data: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "sums.jsonl", line)
    for key, other in (("path", {}), ("heldout_path", {"path": write(tmp_path / "fine.jsonl", {"prompt": "a", "x": "b"})})):
        if key == "heldout_path" and "prompt" in data:
            continue  # the fine file would have to fit the template, too
        with pytest.raises(TaskError) as refused:
            check_items(config(**{key: path}, **other, **data).data)
        assert says.replace("{file}", path) in str(refused.value)


def test_a_file_that_is_absent_a_folder_or_empty_is_one_sentence(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(TaskError, match=f"^data.path is {path}, which cannot be read .{says}"):
            check_items(config(path=str(path)).data)
    with pytest.raises(TaskError, match="which holds no line"):
        items(tmp_path, "", " ")


def test_messages_need_a_chat_template_that_takes_them(tmp_path: Path) -> None:
    path = write(tmp_path / "sums.jsonl", {"prompt": TURNS})
    tokenizer = character_tokenizer(64)
    tokenizer.chat_template = "{{ raise_exception('no\nassistant') }}"
    with pytest.raises(TaskError, match=r":1: the tokenizer's chat template refuses .* user, assistant, user: no assistant$"):
        build_prompts(config(path=path), tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(TaskError, match=r":1: the prompt is for a chat"):
        build_prompts(config(path=path), tokenizer)


def test_too_few_prompts_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no training prompt is left of data\.path=.*sums\.jsonl .* 1 too_long"):
        built(tmp_path, {"prompt": "9" * 60})


def test_a_side_that_stays_empty_is_seen_without_a_tokenizer_and_only_when_the_split_says_so(tmp_path: Path) -> None:
    held = next(text for n in range(99) if is_heldout(text := f"{n}+1=", 0.2))
    kept = [text for n in range(40) if not is_heldout(text := f"{n}+1=", 0.2)][:3]

    def checked(*texts: str, draws: int = 4, **data: Any) -> str:
        path = write(tmp_path / "sums.jsonl", *({"prompt": text} for text in texts))
        made = config(path=path, heldout_fraction=0.2, **data)
        made = made.model_copy(update={"eval": made.eval.model_copy(update={"draws": draws})})
        said = []
        for judge in (lambda: check_sides(made), lambda: build_prompts(made, character_tokenizer(64))):
            try:
                judge()
                said.append("")
            except TaskError as e:
                said.append(str(e))
        assert said[0] == said[1], "what is checked is what the learner says"
        return said[0]

    assert checked(*kept).startswith("eval.draws is 4, but no prompt is held out of 3 (")
    assert checked(*kept, draws=0) == checked(*kept, held) == ""
    assert checked(held, held).startswith("no training prompt is left of data.path=")
    other = write(tmp_path / "other.jsonl", {"prompt": kept[0]})
    assert checked(kept[0], heldout_path=other).startswith("no training prompt is left of data.path=")
    assert checked(*kept, heldout_path=other) == ""
