"""Size and shape of the source: short files, short functions, imports where they can be seen."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LIMITS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["async_rl"]["limits"]
EXCEPTIONS: dict[str, str] = LIMITS["exceptions"]


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def long_files(limit: int) -> dict[str, int]:
    lengths = {name: text.count("\n") for name, text in sources("async_rl", "launch", "benchmarks", "docs", "tests")}
    return {name: length for name, length in lengths.items() if length > limit}


def long_functions(limit: int) -> dict[str, int]:
    return {
        f"{name}:{f.name}": f.end_lineno - f.lineno + 1
        for name, text in sources("async_rl", "launch", "benchmarks", "docs", "tests")
        for f in functions(text)
        if f.end_lineno and f.end_lineno - f.lineno + 1 > limit
    }


def test_no_file_is_long():
    assert not set(long_files(LIMITS["max_file_lines"])) - set(EXCEPTIONS)


def test_no_function_is_long():
    assert not set(long_functions(LIMITS["max_function_lines"])) - set(EXCEPTIONS)


def test_exceptions_are_few_needed_and_have_a_reason():
    long = {**long_files(LIMITS["max_file_lines"]), **long_functions(LIMITS["max_function_lines"])}
    assert len(EXCEPTIONS) <= 3
    assert all(name in long and len(reason) > 20 for name, reason in EXCEPTIONS.items())


def test_only_the_command_line_imports_ours_inside_functions():
    hidden = [
        f"{name}:{node.lineno}"
        for name, text in sources("async_rl")
        if name != "async_rl/cli.py"
        for f in functions(text)
        for node in ast.walk(f)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("async_rl"))
        or (isinstance(node, ast.Import) and any(a.name.startswith("async_rl") for a in node.names))
    ]
    assert hidden == []


def test_every_module_says_what_it_is():
    silent = [name for name, text in sources("async_rl") if text.strip() and not ast.get_docstring(ast.parse(text))]
    assert silent == []


def test_no_path_of_a_machine_is_written_down():
    written = [
        name for name, text in sources("async_rl", "launch", "benchmarks", "docs") if re.search(r"/(home|root|Users)/", text)
    ]
    assert written == []


def test_nothing_that_comes_over_a_network_is_unpickled():
    """The one pickle read is the index of a checkpoint's shards, by torch, in a folder that its owner trusts."""
    words = re.compile(r"recv_pyobj|send_pyobj|pickle\.loads?\(|allow_pickle=True|weights_only=False|\bexec\(")
    found = [f"{name}: {m.group()}" for name, text in sources("async_rl", "launch") for m in words.finditer(text)]
    assert found == []
    assert words.search("data = pickle.loads(frame)")
