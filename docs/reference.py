"""`make docs`: the pages and tables that are written from the code: docs/config.md, docs/algorithms.md, the README's table.

Docstrings and comments in async_rl/config are the source. In algorithms.md and the README only what stands between
`<!-- generated: NAME -->` and `<!-- end -->` is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from async_rl.config import Config, methods, preset, preset_names
from async_rl.config.load import PRESETS

ROOT = Path(__file__).parent.parent
CONFIG, ALGORITHMS, README = ROOT / "docs" / "config.md", ROOT / "docs" / "algorithms.md", ROOT / "README.md"
FIGURES = ROOT / "benchmarks" / "results" / "algorithms.json"
HEAD = """# Configuration

One YAML file, then `key=value` overrides on the command line:
`async-rl train configs/quickstart.yaml num_steps=10 learner.lr=3e-5`.
`async-rl check CONFIG` says what would run, or in one sentence what is wrong. An unknown key is an error.

Written by `make docs` from `async_rl/config/`; edit the docstrings there.
"""
KINDS = {
    "advantage": methods.ADVANTAGES,
    "loss": methods.LOSSES,
    "correction": methods.CORRECTIONS,
    "mask": methods.MASKS,
    "normalizer": methods.NORMALIZERS,
}


def pages() -> dict[Path, str]:
    """Each file with what it must hold."""
    tables = {"presets": presets(), "figures": figures()} | {kind: options(kind, table) for kind, table in KINDS.items()}
    return {
        CONFIG: config(),
        ALGORITHMS: filled(ALGORITHMS.read_text(), tables),
        README: filled(README.read_text(), tables),
    }


def filled(text: str, tables: dict[str, str]) -> str:
    """The text with the tables between its marks."""

    def put(found: re.Match[str]) -> str:
        return f"<!-- generated: {found[1]} -->\n{tables[found[1]]}\n<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", put, text, flags=re.DOTALL)


def presets() -> str:
    """One row per preset: its first line, which is a comment, and the keys that it sets."""
    rows = ["| `algorithm=` | what it is | keys it sets |", "|---|---|---|"]
    for name in preset_names():
        words = (PRESETS / f"{name}.yaml").read_text().splitlines()[0].removeprefix("# ")
        keys = ", ".join(f"`{key}: {_yaml(value)}`" for key, value in preset(name)["algorithm"].items())
        rows.append(f"| `{name}` | {_linked(words)} | {keys} |")
    return "\n".join(rows)


def figures() -> str:
    """One row per run of benchmarks/algorithms.py."""
    names = ("`algorithm=`, or overrides", "`eval_first`", "`eval_last`", "reward, first and last 5 steps", "lag mean, max")
    rows = ["| " + " | ".join((*names, "all, s", "commit")) + " |", "|" + "---|" * (len(names) + 2)]
    for name, run in json.loads(FIGURES.read_text()).items():
        rewards, lags = f"{run['reward_first']:.2f}, {run['reward_last']:.2f}", f"{run['lag_mean']:.2f}, {run['lag_max']}"
        evals = f"{run['eval_first']:.3f} | {run['eval_last']:.3f}"
        rows.append(f"| `{name}` | {evals} | {rewards} | {lags} | {run['seconds']:.0f} | {run['commit']} |")
    return "\n".join(rows)


def _linked(words: str) -> str:
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", words)


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_yaml(v)}" for k, v in value.items()) + "}"
    return str(value)


def options(kind: str, table: Mapping[str, type[BaseModel]]) -> str:
    """One row per method and option."""
    rows = [f"| {kind} | option | default | meaning |", "|---|---|---|---|"]
    for name, section in table.items():
        fields = section.model_fields.items()
        rows += [f"| `{name}` | `{o}` | {_default(f.default)} | {_meaning(f)} |" for o, f in fields] or [f"| `{name}` | | | |"]
    return "\n".join(rows)


def config() -> str:
    """The page: a table per section, the top level first."""
    parts = [HEAD, _table("Top level", "", Config)]
    parts += [_table(f"`{prefix[:-1]}`", prefix, section) for prefix, section in _sections(Config, "")]
    return "\n".join(parts)


def _sections(section: type[BaseModel], prefix: str) -> list[tuple[str, type[BaseModel]]]:
    found = []
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            found += [(f"{prefix}{name}.", field.annotation), *_sections(field.annotation, f"{prefix}{name}.")]
    return found


def _is_section(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _table(title: str, prefix: str, section: type[BaseModel]) -> str:
    rows = [f"## {title}\n", "| key | default | meaning |", "|---|---|---|"]
    for name, field in section.model_fields.items():
        if not _is_section(field.annotation):
            rows.append(f"| `{prefix}{name}` | {_default(field.get_default(call_default_factory=True))} | {_meaning(field)} |")
    return "\n".join(rows) + "\n"


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def _meaning(field: Any) -> str:
    words = " ".join((field.description or "").split()).replace("|", "\\|")
    named = [f"`{choice}`" for choice in _choices(field.annotation)]
    return f"{words} ({', '.join(named)})" if named else words


def _choices(annotation: Any) -> list[str]:
    """The names among which a field chooses, also where it may be null."""
    arguments = getattr(annotation, "__args__", ())
    return [name for x in arguments for name in ([x] if isinstance(x, str) else _choices(x))]


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
