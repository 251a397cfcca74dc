"""Every golden case belongs to a test of this folder: none is left out, and none is filtered away."""

from __future__ import annotations

import ast
from pathlib import Path

from .estimator_cases import CASES

HERE = Path(__file__).parent


def named() -> set[str]:
    """The function ids that stand in a call of `cases(...)` in this folder."""
    found = set()
    for path in HERE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "cases":
                assert len(node.args) == 1 and not node.keywords, f"{path.name}:{node.lineno} leaves out cases"
                (fn,) = node.args
                assert isinstance(fn, ast.Constant), f"{path.name}:{node.lineno} names no function"
                found.add(fn.value)
    return found


def test_all_107_golden_cases_are_covered():
    assert len(CASES) == 107
    assert named() == {case["fn"] for case in CASES}
