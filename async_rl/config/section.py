"""What every section of the tree is: frozen, closed to unknown keys, strict about types, and documented field by field.

Strict: `true` is no number, and 8.0 no count; a float may be written as 1.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

# Upper bounds that nobody meets: beyond them is a slip of the keyboard, and what would overflow somewhere.
MANY = 10**9  # steps, items, answers
LARGE = 1 << 50  # bytes

Path = Annotated[str, Field(min_length=1)]  # of a file or folder; an empty one would stand for the default, or for here
Seconds = Annotated[float, Field(ge=1e-3, le=1e7)]
Few = Annotated[int, Field(ge=1, le=4096)]  # processes, threads, groups in flight


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


def refused(sentence: str) -> PydanticCustomError:
    """What a validator raises to say just this."""
    return PydanticCustomError("sentence", "{sentence}", {"sentence": sentence})
