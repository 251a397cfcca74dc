"""From a YAML file and `key=value` overrides to a checked tree, or to one sentence that says what is wrong."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from async_rl.config.rules import impossible
from async_rl.config.schema import Config, config_keys

PRESETS = Path(__file__).with_name("presets")
# What belongs to one method and would be refused, or would make another of it, beside the next.
METHOD_KEYS = frozenset(
    """preset advantage advantage_options loss loss_options correction correction_options correction_normalize masks
    aggregation normalizer normalizer_options proximal""".split()
)
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
    given = _parse_overrides(overrides)
    try:
        tree = OmegaConf.to_container(_merged(OmegaConf.load(path), given), resolve=True)
    except ConfigError:
        raise
    except (OmegaConfBaseException, ValueError, OSError) as e:
        raise ConfigError(f"{path}: {_one_line(e)}") from None
    except Exception as e:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(e)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no mapping at its top level: see configs/quickstart.yaml")
    return parse_config(tree)


def _merged(file: Any, given: DictConfig) -> Any:
    """The file's preset, the file, the command line's preset, the command line: of two the later wins. A preset on the
    command line also replaces what the file says about methods, which would not fit it."""
    if not isinstance(file, DictConfig):
        return file
    own, asked = _preset_of(file), _preset_of(given)
    if asked:
        return OmegaConf.merge(_without_methods(file), preset(asked), given)
    return OmegaConf.merge(preset(own), file, given) if own else OmegaConf.merge(file, given)


def _preset_of(layer: DictConfig) -> str | None:
    """The preset that a layer names, in either spelling; a file's short one is written out in place."""
    name = layer.get("algorithm")
    if isinstance(name, str):
        layer.algorithm = {"preset": name}
    name = OmegaConf.select(layer, "algorithm.preset")
    return None if name is None else str(name)


def _without_methods(file: DictConfig) -> DictConfig:
    bare = file.copy()
    for key in METHOD_KEYS & (bare.get("algorithm") or {}).keys():
        del bare.algorithm[key]
    return bare


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


def _parse_overrides(overrides: list[str] | tuple[str, ...]) -> DictConfig:
    given = OmegaConf.create({})
    for item in overrides:
        if "=" not in item:
            raise ConfigError(f"override '{item}' has no '=': write key=value, for example num_steps=10")
        if re.fullmatch(r"algorithm=\w+", item):
            item = item.replace("=", ".preset=")
        try:
            given.merge_with_dotlist([item])
        except Exception as e:  # yaml's and OmegaConf's errors share no base, and some dotlists end in an IndexError
            raise ConfigError(
                f"override '{item}' cannot be read ({_one_line(e)}): the value is YAML, so text with braces, brackets, "
                "stars or colons wants quotes of its own, for example data.prompt='\"{expression}=\"'"
            ) from None
    return given


def parse_config(tree: dict[Any, Any]) -> Config:
    """The checked tree from plain data; raises ConfigError as `load_config` does."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as e:
        raise ConfigError(_sentence(e)) from None
    for broken, sentence in impossible(config):
        if broken:
            raise ConfigError(sentence)
    return config


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
    if first["type"] == "missing":
        return f"config key '{key}' is missing: set it in the file or as {key}=VALUE{more}"
    return f"config key '{key}' is {first['input']!r}: {message}{more}" if key else message + more


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
