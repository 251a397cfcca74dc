"""What `check` sees of a user's own reward, data and model name, in the time a person waits."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import ConfigError, DataConfig, parse_config
from async_rl.envs.rewards import RewardError, check_loadable
from async_rl.launcher import preflight
from async_rl.launcher.hub import why_no_hub
from async_rl.launcher.plan import Machine, make_plan
from async_rl.launcher.rewards import check_fit, check_reward


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("no_colon", "package.module:function"),
        ("no.such.module:f", "finds no module no.such.module: start in the folder that holds it"),
        ("no_such_file.py:f", "write no_such_file:f"),
        ("async_rl.envs.rewards:first_integr", "holds no first_integr: did you mean 'first_integer'"),
    ],
)
def test_a_reward_that_cannot_be_is_refused(reward: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_reward(reward)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(prompt, answer)\n    return 1\n", r"mine\.py:1 is not Python \(expected ':'\): mend it"),
        ("import os\nimport no_such_package.part\ndef f(p, a): return 1\n", r"mine\.py:2 imports no_such_package"),
        ("f = 3\n", "f in mine.py is no function"),
        ("def g(p, a): return 1\n", "holds no f"),
        ("# f\n", "holds no f"),
    ],
)
def test_a_module_of_ones_own_is_judged_by_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=words):
        check_reward("mine:f")


@pytest.mark.parametrize(
    "source",
    [
        "async def f(p, a): return 1\n",
        "from math import gamma as f\n",
        "from math import *\n",
        "import functools\nf = functools.partial(max)\n",
        "try:\n    import no_such_package\nexcept ImportError:\n    pass\nif True:\n    def f(p, a): return 1\n",
        "class f:\n    def __init__(self, p, a): ...\n",
        "f, g = max, min\n",
        "def __getattr__(name): return max\n",
    ],
)
def test_whatever_may_be_a_function_is_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (tmp_path / "mine2.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    check_reward("mine2:f")


MISFITS = [
    ("def {f}(prompt, answer): ...", r"does not take the field `target` \(the gold answer\) of d\.jsonl:1"),
    ("def {f}(prompt, answer, target): ...", r"does not take the field `units` of d\.jsonl:1: add that .* or \*\*fields"),
    ("def {f}(prompt, answer, *, level, **fields): ...", "missing a required .*'level'"),
    ("def {f}(units, answer, **fields): ...", "multiple values for argument 'units'"),
    ("def {f}(prompt, **fields): ...", "too many positional"),
    ("async def {f}(p, a, target, units, /, b=1): ...", "does not take the field `target`"),
]
FITS = [
    "def {f}(prompt, answer, target, units=3, *more, level=2): ...",
    "async def {f}(*args, **fields): ...",
    "def {f}(p, a, /, *, units, **rest): ...",
]


@pytest.mark.parametrize(("source", "words"), [*MISFITS, *((source, "") for source in FITS)])
def test_a_reward_that_cannot_take_the_fields_is_refused_by_its_source_and_when_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    name = f"fit{hashlib.md5(source.encode()).hexdigest()}"
    (tmp_path / f"{name}.py").write_text(source.format(f="f") + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[1]}")
    examples = [("d.jsonl:1", ["target", "units"])]
    if not words:
        check_fit(f"{name}:f", examples)
        check_loadable(f"{name}:f", examples)
        return
    with pytest.raises(ConfigError, match=words):
        check_fit(f"{name}:f", examples)
    with pytest.raises(RewardError, match=words):
        check_loadable(f"{name}:f", examples)


def test_what_a_decorator_or_a_second_definition_makes_of_a_reward_is_not_guessed(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine3.py").write_text("import functools\n@functools.cache\ndef f(): ...\ndef g(): ...\ng = f\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_fit("mine3:f", [("d.jsonl:1", ["units"])])
    check_fit("mine3:g", [("d.jsonl:1", ["units"])])


@pytest.mark.parametrize("line", ["{", '["a"]', '{"promt": "x"}', '{"prompt": 3}', '{"prompt": ""}'])
def test_a_line_in_the_middle_of_a_file_is_read_before_anything_starts(tmp_path: Path, line: str) -> None:
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"prompt": f"{i}+1="}) for i in range(40)]
    path.write_text("\n".join([*lines[:20], line, *lines[20:]]))
    with pytest.raises(ConfigError, match=r"data\.jsonl:21"):
        preflight.check_data(DataConfig(path=str(path)))


def test_a_long_file_is_read_only_as_far_as_a_person_waits(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(['{"prompt": "1+1="}'] * 400_000))
    started = time.monotonic()
    preflight.check_data(DataConfig(path=str(path)))
    assert time.monotonic() - started < 2.5


def test_a_template_over_a_dataset_is_filled_before_anything_starts() -> None:
    preflight.check_data(DataConfig(prompt="{expression}="))
    with pytest.raises(ConfigError, match="'exprssion'"):
        preflight.check_data(DataConfig(prompt="{exprssion}="))


def test_evaluating_without_a_held_out_share_is_refused() -> None:
    tree = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, "model": {"path": "org/name"}}
    with pytest.raises(ConfigError, match=r"data\.heldout_fraction is 0, but eval\.draws=512"):
        parse_config({**tree, "data": {"heldout_fraction": 0}})


def _without_proxies(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_a_name_that_is_no_folder_and_cannot_be_looked_up_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, "model": {"path": "exp_bestt"}}
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as hub:
        _without_proxies(monkeypatch, f"http://127.0.0.1:{hub.getsockname()[1]}")
        preflight.check_model(parse_config(tree))
    with pytest.raises(ConfigError, match=r"no folder here, and its name cannot be looked up on the hub.*refused"):
        preflight.check_model(parse_config(tree))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert why_no_hub("exp_bestt") == ""
    monkeypatch.delenv("HTTP_PROXY")
    (tmp_path / "models--org--name").mkdir()
    assert why_no_hub("org/name") == ""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in why_no_hub("exp_bestt")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "8 prompts x 4 answers, 4 steps"),
        ({"group_size_end": 16}, "8 prompts x 4 answers, in the end 2 x 16, 4 steps"),
        ({"adaptive_group_sizes": [2, 12]}, "8 prompts x 4 answers (2 to 12, by prompt), 4 steps"),
        ({"algorithm": {"advantage": "remax"}}, "8 prompts x 4 answers and a greedy one, 4 steps"),
    ],
)
def test_the_summary_says_how_many_answers_a_step_has(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    tree = {"num_steps": 4, "groups_per_step": 8, "group_size": 4, "model": {"path": "org/name"}}
    config = parse_config(tree | changes)
    machine = Machine((0, 1), (), {})
    rows = preflight.summary(config, make_plan(config, tmp_path, machine), machine, tmp_path).splitlines()
    assert [row.split(maxsplit=1)[1] for row in rows if row.split()[0] == "batch"] == [says]
