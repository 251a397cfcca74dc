"""A damaged model folder is one sentence before anything starts; a whole one is not refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.config import ConfigError, parse_config
from async_rl.launcher.folder import INDEX, SINGLE, check_folder
from async_rl.launcher.preflight import check_model


def weights(file: Path, num_bytes: int = 32) -> None:
    header = json.dumps({"__metadata__": {}, "a": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}})
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(num_bytes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    weights(tmp_path / SINGLE)
    return tmp_path


def shard(folder: Path, weight_map: object) -> None:
    (folder / SINGLE).unlink()
    weights(folder / "one.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "config.json").unlink(), "a folder without config.json"),
    (lambda f: (f / "config.json").write_text('{"a": ['), r"where config\.json cannot be read \(Expecting"),
    (lambda f: (f / "config.json").write_text("[1]"), r"where config\.json is no JSON object"),
    (lambda f: (f / SINGLE).unlink(), r"a folder without weights \(model\.safetensors\)"),
    (lambda f: (f / SINGLE).write_bytes(b""), r"where model\.safetensors has no header"),
    (lambda f: (f / SINGLE).write_bytes(b"\x01" * 500), r"where model\.safetensors has no header"),
    (lambda f: (f / SINGLE).write_bytes(b"\x02" + bytes(7) + b"[]"), r"where model\.safetensors has no header"),
    (lambda f: cut(f / SINGLE), r"where model\.safetensors has \d+ bytes instead of the \d+ that its header asks for"),
    (lambda f: shard(f, {"a": "one.safetensors", "b": "two.safetensors"}), r"where two\.safetensors is missing, which .*index"),
    (lambda f: shard(f, ["a"]), r"index\.json has no weight_map"),
    (lambda f: (f / "tokenizer.json").unlink(), r"a folder without a tokenizer \(tokenizer\.json"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_a_damaged_folder_is_refused_by_the_part_that_is_damaged(
    folder: Path, damage: Callable[[Path], object], words: str
) -> None:
    check_folder(folder)
    damage(folder)
    tree = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, "model": {"path": str(folder)}}
    with pytest.raises(ConfigError, match=words) as refusal:
        check_model(parse_config(tree))
    assert "\n" not in str(refusal.value) and str(refusal.value).startswith(f"model.path is {folder}")


def test_shards_and_other_kinds_of_weights_are_let_through(folder: Path) -> None:
    shard(folder, {"a": "one.safetensors"})
    check_folder(folder)
    (folder / INDEX).unlink()
    check_folder(folder)
    (folder / "one.safetensors").rename(folder / "pytorch_model.bin")
    check_folder(folder)
