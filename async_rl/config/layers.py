"""Layers of a configuration as plain trees, laid over each other: of two the later wins.

Invariant: options stay with their method. A layer that names another method than those below it does not inherit their
options.
"""

from __future__ import annotations

from typing import Any

from async_rl.config.algorithm import KINDS

Tree = dict[str, Any]
Key = tuple[str, ...]  # a dotted key, taken apart


def over(below: Tree, above: Tree) -> Tree:
    """One layer over another; options of a method that the upper one replaces go with it."""
    old, new = algorithm_of(below), algorithm_of(above)
    replaced = {kind for kind, (default, _) in KINDS.items() if kind in new and new[kind] != old.get(kind, default)}
    return merged(without(below, {("algorithm", f"{kind}_options") for kind in replaced}), above)


def merged(below: Any, above: Any) -> Any:
    """Mappings key by key; of anything else the one above."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: merged(below[key], value) if key in below else value for key, value in above.items()}


def without(tree: Tree, keys: set[Key]) -> Tree:
    """The tree without what stands under these keys."""
    left: Tree = {}
    for name, value in tree.items():
        inner = {key[1:] for key in keys if key[0] == name}
        if () not in inner:
            left[name] = without(value, inner) if inner and isinstance(value, dict) else value
    return left


def algorithm_of(tree: Tree) -> Tree:
    """The section, or nothing where none is given or something else stands in its place."""
    section = tree.get("algorithm")
    return section if isinstance(section, dict) else {}
