"""From a YAML file and `key=value` overrides to a checked tree, or to one sentence that says what is wrong."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from async_rl.config.layers import Key, Tree, algorithm_of, merged, over, without
from async_rl.config.rules import impossible
from async_rl.config.schema import Config, config_keys

PRESETS = Path(__file__).with_name("presets")
# What belongs to one method and would be refused, or would make another of it, beside the next.
METHOD_KEYS = frozenset(
    """preset advantage advantage_options loss loss_options correction correction_options correction_normalize masks
    aggregation normalizer normalizer_options proximal""".split()
)
ALGORITHM: Key = ("algorithm",)
TRUNCATED_SAMPLING = frozenset("top_p top_k min_p presence_penalty frequency_penalty repetition_penalty".split())


class ConfigError(Exception):
    """A user's mistake in a configuration; the message is one sentence that names the key and the fix."""


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file, apply `key=value` overrides, check everything that needs no model.

    Raises ConfigError, one sentence, for a missing file, YAML that does not parse, an unknown key (with the nearest
    known one), a wrong type or an impossible value.
    """
    path = Path(path)
    if not path.is_file():
        what = "is no regular file" if path.exists() else "does not exist"
        raise ConfigError(f"config file {path} {what}: give the path of a YAML file such as configs/quickstart.yaml")
    given, whole = _parse_overrides(overrides)
    file = _read(path)
    try:
        tree = OmegaConf.to_container(OmegaConf.create(_layered(file, given, whole)), resolve=True)
    except (OmegaConfBaseException, ValueError) as e:
        raise ConfigError(f"{path}: {_one_line(e)}") from None
    assert isinstance(tree, dict)  # as its layers are
    return parse_config(tree)


def _read(path: Path) -> Tree:
    """What a file says, its interpolations as they stand."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, ValueError, OSError) as e:
        raise ConfigError(f"{path}: {_one_line(e)}") from None
    except Exception as e:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(e)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no mapping at its top level: see configs/quickstart.yaml")
    return _written_out({str(key): value for key, value in tree.items()})


def _layered(file: Tree, given: Tree, whole: set[Key]) -> Tree:
    """The file's preset, the file, the command line's preset, the command line: of two the later wins.

    A preset on the command line also replaces what the file says about methods, which would not fit it. `whole` are the
    keys to which the command line gives a mapping: it replaces those below instead of adding to them. So do the masks of
    a file with those of its preset.
    """
    if ALGORITHM in whole:
        file = without(file, {ALGORITHM})
    own, asked = _preset_of(file), _preset_of(given)
    if asked is not None:
        below = over(without(file, {("algorithm", key) for key in METHOD_KEYS}), preset(asked))
    elif own is not None:
        masks = {("algorithm", "masks")} if "masks" in algorithm_of(file) else set()
        below = over(without(preset(own), masks), file)
    else:
        below = file
    return over(without(below, whole - {ALGORITHM}), given)


def _written_out(layer: Tree) -> Tree:
    """With `algorithm: ppo`, which is short for its preset, written out."""
    name = layer.get("algorithm")
    return layer | {"algorithm": {"preset": name}} if isinstance(name, str) else layer


def _preset_of(layer: Tree) -> str | None:
    if algorithm_of(layer).get("preset") is None:
        return None
    return str(OmegaConf.select(OmegaConf.create(layer), "algorithm.preset"))  # it may be an interpolation


def preset(name: str) -> dict[str, Any]:
    """The keys that a preset sets, as a tree. Raises ConfigError for a name there is none of."""
    file = PRESETS / f"{name}.yaml"
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(f"algorithm={name} is no preset: {hint}There are {', '.join(preset_names())}")
    return yaml.safe_load(file.read_text())


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def _parse_overrides(overrides: list[str] | tuple[str, ...]) -> tuple[Tree, set[Key]]:
    """What they say together, of two the later wins, and the keys whose value is a mapping."""
    given: Tree = {}
    whole: set[Key] = set()
    for item in overrides:
        if "=" not in item:
            raise ConfigError(f"override '{item}' has no '=': write key=value, for example num_steps=10")
        if re.fullmatch(r"algorithm=\w+", item):
            item = item.replace("=", ".preset=")
        try:
            layer = OmegaConf.to_container(OmegaConf.from_dotlist([item]))
        except Exception as e:  # yaml's and OmegaConf's errors share no base, and some dotlists end in an IndexError
            raise ConfigError(
                f"override '{item}' cannot be read ({_one_line(e)}): the value is YAML, so text with braces, brackets, "
                "stars or colons wants quotes of its own, for example data.prompt='\"{expression}=\"'"
            ) from None
        assert isinstance(layer, dict)
        key, value = _key_and_value(item, layer)
        if isinstance(value, dict):
            given, whole = without(given, {key}), whole | {key}
        given = merged(given, layer)
    return _written_out(given), whole


def _key_and_value(item: str, layer: Any) -> tuple[Key, Any]:
    """The key of an override, taken apart, and its value: what stands as deep in its tree as the key has parts."""
    key: list[str] = []
    for _ in re.split(r"[.\[]", item.partition("=")[0]):
        if isinstance(layer, dict) and layer:
            name, layer = next(iter(layer.items()))
            key.append(name)
    return tuple(key), layer


def parse_config(tree: dict[Any, Any]) -> Config:
    """The checked tree from plain data; raises ConfigError as `load_config` does."""
    if key := _with_nul(tree):
        raise ConfigError(f"{key} holds a NUL character, which no path or name has: leave it out")
    try:
        config = Config.model_validate(tree)
    except ValidationError as e:
        raise ConfigError(_sentence(e)) from None
    for broken, sentence in impossible(config):
        if broken:
            raise ConfigError(sentence)
    return config


def _with_nul(value: Any, key: str = "") -> str:
    """The first key whose text, or the text of a part, holds one; "" without any."""
    if isinstance(value, str):
        return (key or "the configuration") if "\0" in value else ""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next(filter(None, (_with_nul(part, f"{key}.{name}" if key else str(name)) for name, part in parts)), "")


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    message = first["msg"]
    key = ".".join(str(part) for part in first["loc"])
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "sentence":
        return message + more
    if first["type"] == "extra_forbidden" and str(first["loc"][-1]) in TRUNCATED_SAMPLING:
        return (
            f"'{key}' is not offered: with it an engine samples from other probabilities than the log-probs it returns, which "
            "no correction here undoes; use rollout.temperature alone"
        )
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, config_keys(), n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else "see docs/config.md for the keys"
        return f"unknown config key '{key}': {hint}{more}"
    if first["type"] == "model_type":
        short = " or a preset, algorithm=ppo" if key == "algorithm" else ""
        names = [name.removeprefix(f"{key}.") for name in config_keys() if name.startswith(f"{key}.")]
        return f"'{key}' is {first['input']!r}, but it is a section: set a key of it, as in {key}.{names[0]}=VALUE{short}{more}"
    if first["type"] == "missing":
        return f"config key '{key}' is missing: set it in the file or as {key}=VALUE{more}"
    return f"config key '{key}' is {first['input']!r}: {message}{more}" if key else message + more


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
