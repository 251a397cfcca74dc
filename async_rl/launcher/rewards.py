"""The reward function, judged by its module's source: importing it may take long, and `check` must answer at once.

Imports config and envs. Invariant: what cannot be seen in the source is not refused here; the rollout, which loads the function
before its engine, has the last word.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from async_rl.config import ConfigError
from async_rl.envs.fitting import Example, misfit

LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.JoinedStr)


def check_reward(reward: str) -> None:
    """Raises ConfigError for a name that is not `package.module:function`, a module that Python does not find or cannot parse
    or whose own imports are missing, and a name in it that is absent or plainly no function."""
    module, colon, function = reward.partition(":")
    if not colon or not module or not function.isidentifier():
        raise ConfigError(f"data.reward is '{reward}': write package.module:function")
    origin = _origin(module)
    if origin is None:
        hint = (
            f"write {module[:-3]}:{function}"
            if module.endswith(".py")
            else "start in the folder that holds it, install it or set PYTHONPATH"
        )
        raise ConfigError(f"data.reward is '{reward}', but Python finds no module {module}: {hint}")
    if origin.endswith(".py"):
        _check_source(reward, Path(origin), function)


def check_fit(reward: str, examples: Iterable[Example]) -> None:
    """Raises ConfigError for a plain `def` whose parameters cannot take the fields of these examples."""
    module, _, function = reward.partition(":")
    origin = _origin(module) or ""
    if not origin.endswith(".py"):
        return
    bound = list(_bound(ast.parse(Path(origin).read_bytes())))
    found = [node for name, node in bound if name in (function, "*")]
    if len(found) != 1 or not isinstance(found[0], ast.FunctionDef | ast.AsyncFunctionDef) or found[0].decorator_list:
        return
    if problem := misfit(_signature(found[0].args), examples):
        raise ConfigError(f"data.reward is '{reward}', which cannot be used: {problem}")


def _signature(args: ast.arguments) -> inspect.Signature:
    """What inspect would say of the function."""
    given, empty = inspect.Parameter, inspect.Parameter.empty
    plain = [(a, given.POSITIONAL_ONLY) for a in args.posonlyargs] + [(a, given.POSITIONAL_OR_KEYWORD) for a in args.args]
    required = len(plain) - len(args.defaults)
    parameters = [given(a.arg, kind, default=empty if n < required else None) for n, (a, kind) in enumerate(plain)]
    parameters += [given(args.vararg.arg, given.VAR_POSITIONAL)] if args.vararg else []
    for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parameters.append(given(a.arg, given.KEYWORD_ONLY, default=empty if default is None else None))
    parameters += [given(args.kwarg.arg, given.VAR_KEYWORD)] if args.kwarg else []
    return inspect.Signature(parameters)


def _origin(module: str) -> str | None:
    """Where its source would be; "" for a module without one."""
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # finding a.b imports a, which may be anybody's code
        spec = None
    return None if spec is None else spec.origin or ""


def _check_source(reward: str, path: Path, function: str) -> None:
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as e:
        line = f":{e.lineno}" if isinstance(e, SyntaxError) else ""
        what = e.msg if isinstance(e, SyntaxError) else e
        raise ConfigError(f"data.reward is '{reward}', but {path.name}{line} is not Python ({what}): mend it") from None
    for name, line in _imports(tree):
        if _origin(name) is None:
            raise ConfigError(
                f"data.reward is '{reward}', but {path.name}:{line} imports {name}, which Python does not find: install it"
            )
    bound = dict(_bound(tree))
    if function not in bound and "*" not in bound and "__getattr__" not in bound:
        near = difflib.get_close_matches(function, bound, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "see async_rl/envs/rewards.py for those built in"
        raise ConfigError(f"data.reward is '{reward}', but {path.name} holds no {function}: {hint}")
    if isinstance(bound.get(function), LITERALS):
        raise ConfigError(f"data.reward is '{reward}', but {function} in {path.name} is no function: name one")


def _imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(top-level package, line) of what the module imports whenever it is loaded; none inside `try`, `if` or functions."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno


def _bound(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """(name, what it is bound to) at the module's top level, inside its `if` and `try`, too; the last binding counts."""
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                value = node.value if isinstance(target, ast.Name) else node  # unpacked: who gets what is not looked into
                yield from ((name.id, value) for name in ast.walk(target) if isinstance(name, ast.Name))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, block, []))
            yield from (inner for handler in getattr(node, "handlers", []) for inner in _statements(handler.body))
