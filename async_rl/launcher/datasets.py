"""What reasoning-gym offers, read from its source: importing it takes seconds, and `check` must answer at once.

Imports config only. Invariant: what cannot be read is not refused here; the learner, which imports the library, has the
last word.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

from async_rl.config import ConfigError, DataConfig

NAMED = re.compile(r"""(?:DATASET_NAME\s*=\s*|register_dataset\(\s*)["'](\w+)["']""")


def check_dataset(data: DataConfig) -> None:
    """Raises ConfigError for a dataset or an option that the installed reasoning-gym does not have."""
    files = _files_by_name()
    if not files:
        return  # absent here: the learner's own machine will say
    if data.dataset not in files:
        hint = _nearest(data.dataset, files) or "its gallery lists the names, for example basic_arithmetic"
        raise ConfigError(f"data.dataset is '{data.dataset}', which reasoning-gym does not have: {hint}")
    known = _options(files[data.dataset], data.dataset)
    for key in data.options:
        if known and key not in known:
            hint = _nearest(key, known) or f"it has {', '.join(sorted(known))}"
            raise ConfigError(f"data.options.{key} is no option of '{data.dataset}': {hint}")


def _files_by_name() -> dict[str, Path]:
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        return {}
    files = Path(spec.submodule_search_locations[0]).rglob("*.py")
    return {name: file for file in files for name in NAMED.findall(file.read_text(errors="replace"))}


def _options(file: Path, name: str) -> set[str]:
    """The fields of the configuration class that the file registers for the dataset; empty when that is not plain to see."""
    tree = ast.parse(file.read_text(errors="replace"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if not (isinstance(call.func, ast.Name) and call.func.id == "register_dataset" and len(call.args) >= 3):
            continue
        first, _, config = call.args[:3]
        registered = first.value if isinstance(first, ast.Constant) else constants.get(getattr(first, "id", ""))
        owner = classes.get(getattr(config, "id", ""))
        if registered == name and owner is not None and not owner.bases:
            return {f.target.id for f in owner.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)}
    return set()


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean '{near[0]}'?" if near else ""
