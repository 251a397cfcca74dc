"""What the tests of losses, corrections and masks share: golden cases, terms from plain lists, options of every loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_rl.algorithms import aggregation
from async_rl.algorithms.losses import LOSSES
from async_rl.algorithms.terms import Terms

CASES = json.loads((Path(__file__).parents[2] / "golden" / "algorithms.json").read_text())

CLIP = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": CLIP,
    "bypass_ppo": CLIP,
    "decoupled_ppo": CLIP,
    "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},
    "cispo": {"low": 0.0, "high": 5.0},
    "aipo": {"delta": 2.0},
    "topr": {},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "dppo_tv": {"tv_high": 0.2, "tv_low": 0.2, "kl_tau": 1e-3},
    "kimi_k15": {"tau": 0.1},
    "kimi_pmd": {"tau": 0.1},
}


def close(got, want, tol: float) -> None:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert (np.abs(got - want) <= tol * np.maximum(1, np.abs(want))).all(), f"{got} != {want}"


def f64(x) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def flat(rows: list[list]) -> list:
    return [x for row in rows for x in row]


def index_of(rows: list[list]) -> Tensor:
    return torch.tensor([i for i, row in enumerate(rows) for _ in row], dtype=torch.int64)


def make_terms(logp, *, prox=None, behav=None, adv=None, weight=None, mask=None, sequence=None, num_sequences=None) -> Terms:
    """Terms in float64; by default on-policy, weight 1, advantage 0, all trainable, one trajectory. `logp` gets a gradient."""
    logp = f64(logp)
    sequence = torch.zeros(len(logp), dtype=torch.int64) if sequence is None else sequence
    return Terms(
        logp.clone().requires_grad_(),
        logp if prox is None else f64(prox),
        logp if behav is None else f64(behav),
        torch.zeros_like(logp) if adv is None else f64(adv),
        torch.ones_like(logp) if weight is None else f64(weight),
        torch.ones(len(logp), dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool(),
        sequence,
        (int(sequence.max()) + 1 if len(sequence) else 0) if num_sequences is None else num_sequences,
    )


def random_terms(seed: int, num_tokens: int = 40, num_sequences: int = 7, logp_min: float = -4.0) -> Terms:
    """One advantage per trajectory, as a sequence-level loss wants it."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.rand(n, generator=generator, dtype=torch.float64)  # noqa: E731
    sequence = torch.randint(num_sequences, (num_tokens,), generator=generator).sort().values
    logp, prox, behav = (logp_min * draw(num_tokens) for _ in range(3))
    adv, weight, mask = (2 * draw(num_sequences) - 1)[sequence], 2 * draw(num_tokens), draw(num_tokens) < 0.6
    return make_terms(
        logp, prox=prox, behav=behav, adv=adv, weight=weight, mask=mask, sequence=sequence, num_sequences=num_sequences
    )


def gradient(terms: Terms, scalar: Tensor) -> Tensor:
    (slopes,) = torch.autograd.grad(scalar, terms.logp_R)
    return slopes


def aggregated(name: str, terms: Terms, mode: str, **options) -> Tensor:
    """The loss of a step that is one micro-batch, with gradient."""
    counts = aggregation.num_tokens_per_sequence(terms.mask_R, terms.sequence_R, terms.num_sequences)
    alone = torch.arange(terms.num_sequences)  # every trajectory is of a prompt of its own
    scale = aggregation.token_scales(mode, terms.mask_R, terms.sequence_R, counts, group_ids_N=alone, max_tokens=9)
    loss = LOSSES[name](terms, **options).loss
    count = aggregation.denominator(mode, counts, group_ids_N=alone)
    return aggregation.contribution(loss, scale, terms.mask_R, 1, max(1, count))
