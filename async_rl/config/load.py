"""From a YAML file and `key=value` overrides to a checked tree, or to one sentence that says what is wrong."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from async_rl.config.rules import impossible
from async_rl.config.schema import Config, config_keys


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
        tree = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(path), given), resolve=True)
    except (OmegaConfBaseException, ValueError, OSError) as e:
        raise ConfigError(f"{path}: {_one_line(e)}") from None
    except Exception as e:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(e)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no mapping at its top level: see configs/quickstart.yaml")
    return parse_config(tree)


def _parse_overrides(overrides: list[str] | tuple[str, ...]) -> DictConfig:
    given = OmegaConf.create({})
    for item in overrides:
        if "=" not in item:
            raise ConfigError(f"override '{item}' has no '=': write key=value, for example num_steps=10")
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
    key = ".".join(str(part) for part in first["loc"])
    more = f" ({error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, config_keys(), n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else "see docs/config.md for the keys"
        return f"unknown config key '{key}': {hint}{more}"
    if first["type"] == "missing":
        return f"config key '{key}' is missing: set it in the file or as {key}=VALUE{more}"
    message = first["msg"]
    return f"config key '{key}' is {first['input']!r}: {message}{more}" if key else message + more


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
