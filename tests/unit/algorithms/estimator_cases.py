"""What the tests of estimators share: golden cases, flat tensors from ragged rows, and random rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

CASES = json.loads((Path(__file__).parents[2] / "golden" / "algorithms.json").read_text())


def cases(fn: str):
    """Parametrizes a test by every golden case of one function."""
    mine = [c for c in CASES if c["fn"] == fn]
    assert mine, f"no golden case of {fn}"
    return pytest.mark.parametrize(
        ("inputs", "expected", "tol"), [pytest.param(c["inputs"], c["expected"], c["tol"], id=c["name"]) for c in mine]
    )


def f64(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def bools(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.bool)


def close(got, want, tol: float = 1e-9) -> None:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert (np.abs(got - want) <= tol * np.maximum(1, np.abs(want))).all(), f"{got} != {want}"


def flat(rows) -> list:
    return [x for row in rows for x in row]


def sequence_of(rows) -> torch.Tensor:
    """int64 [R]: the row of each entry."""
    return torch.tensor([i for i, row in enumerate(rows) for _ in row], dtype=torch.int64)


def columns(rows, *, garbage: float | None = None) -> list[torch.Tensor]:
    """Tensors [R] of the entries of each token, the last of which says whether it is trainable."""
    tokens = flat(rows)
    width = len(tokens[0]) if tokens else 5
    mask = bools([t[-1] for t in tokens])
    out = [f64([t[k] for t in tokens]) for k in range(width - 1)]
    if garbage is not None:
        out = [torch.where(mask, x, garbage) for x in out]
    return [*out, mask]


number = st.floats(-3, 3).map(lambda x: round(x, 3))
logp = st.floats(-4, 0)
token = st.tuples(number, number, logp, logp, st.booleans())  # reward, value, proximal and behavior log-prob, trainable
ragged = st.lists(st.lists(token, max_size=7), min_size=1, max_size=5)
lambdas = st.floats(0, 1)
gammas = st.sampled_from([1.0, 0.9, 0.5])
