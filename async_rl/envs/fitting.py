"""Whether a reward function can be called with what it will be given: the prompt, the answer, and an item's other fields.

Imports the standard library only. Invariant: what Python would let through is not refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

Example = tuple[str, Sequence[str]]
"""Where an item stands, and the names of its fields."""


def misfit(signature: inspect.Signature, examples: Iterable[Example]) -> str:
    """Why the call with the first of these examples that does not fit would fail; "" when all fit."""
    for where, names in examples:
        try:
            signature.bind("", "", **dict.fromkeys(names))
        except TypeError as e:
            return _why(signature, where, names, str(e))
    return ""


def _why(signature: inspect.Signature, where: str, names: Sequence[str], problem: str) -> str:
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    unknown = [name for name in names if kinds.get(name) not in by_name]
    if unknown and not takes_all:
        renamed = " (the gold answer)" if unknown[0] == "target" else ""
        return f"it does not take the field `{unknown[0]}`{renamed} of {where}: add that parameter, or **fields for all others"
    fields = ", ".join(names) or "none"
    return (
        f"it cannot be called with a prompt, an answer and the fields of {where} ({fields}): {problem}; "
        "take these, and **fields for all others"
    )
