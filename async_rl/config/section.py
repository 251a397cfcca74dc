"""What every section of the tree is: frozen, closed to unknown keys, and documented field by field."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=1e-3, le=1e7)]
Few = Annotated[int, Field(ge=1, le=4096)]  # processes, threads, groups in flight


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )
