"""`make docs`: write docs/config.md from the docstrings in async_rl/config/schema.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from async_rl.config import Config

OUT = Path(__file__).with_name("config.md")
HEAD = """# Configuration

One YAML file, then `key=value` overrides on the command line:
`async-rl train configs/quickstart.yaml num_steps=10 learner.lr=3e-5`.
`async-rl check CONFIG` says what would run, or in one sentence what is wrong. An unknown key is an error.

Written by `make docs` from `async_rl/config/schema.py`; edit the docstrings there.
"""


def render() -> str:
    """The page: a table per section, the top level first."""
    sections = {name: f.annotation for name, f in Config.model_fields.items()}
    parts = [HEAD, _table("Top level", "", Config)]
    parts += [_table(f"`{name}`", f"{name}.", section) for name, section in sections.items() if _is_section(section)]
    return "\n".join(parts)


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
    choices = getattr(field.annotation, "__args__", ())
    words = " ".join((field.description or "").split()).replace("|", "\\|")
    named = [f"`{choice}`" for choice in choices if isinstance(choice, str)]
    return f"{words} ({', '.join(named)})" if named else words


if __name__ == "__main__":
    OUT.write_text(render())
