"""The vectorised algorithms against plain loops written close to the notation of the papers: value and gradient."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms import aggregation
from async_rl.algorithms.corrections import CORRECTIONS
from async_rl.algorithms.losses import LOSSES
from async_rl.algorithms.terms import Terms

logps = st.floats(-30, 0)
advantages = st.one_of(st.just(0.0), st.floats(-5, 5))
token = st.tuples(logps, logps, logps, advantages, st.booleans())
ragged = st.lists(st.lists(token, max_size=6), min_size=1, max_size=5)
dual_clips = st.one_of(st.none(), st.floats(1.1, 5))
EPS_LOW, EPS_HIGH = 0.2, 0.28


def slow_ppo(logp, prox, weight, advantage, dual):
    """(loss, its derivative by logp) of one token."""
    r = math.exp(max(-20, min(20, logp - prox)))
    dr = r if abs(logp - prox) < 20 else 0.0
    plain, clipped = -advantage * r, -advantage * max(1 - EPS_LOW, min(1 + EPS_HIGH, r))
    loss, slope = (plain, -advantage * dr) if plain >= clipped else (clipped, 0.0)
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        loss, slope = -dual * advantage, 0.0
    return weight * loss, weight * slope


def slow_step(rows, mode, cap, dual):
    """The step's loss and its derivative by every log-prob, trajectory by trajectory, token by token."""
    trained = [sum(m for *_, m in row) for row in rows]
    n = sum(trained) if mode == "token_mean" else sum(t > 0 for t in trained)
    each = {"seq_mean_token_mean": lambda t: 1 / t, "prompt_mean": lambda t: 1 / t, "seq_mean_token_sum_norm": lambda t: 1 / 9}
    total, slopes = 0.0, []
    for row, length in zip(rows, trained, strict=True):
        for logp, prox, behav, advantage, m in row:
            weight = min(math.exp(max(-20, min(20, prox - behav))), cap)
            loss, slope = slow_ppo(logp, prox, weight, advantage, dual) if m else (0.0, 0.0)
            per_token = each.get(mode, lambda t: 1.0)(length) if length else 1.0
            total += per_token * loss / n if n else 0.0
            slopes.append(per_token * slope / n if n else 0.0)
    return total, slopes


def fast_step(rows, mode, cap, dual, splits):
    """The same through the library, with the trajectories dealt to `splits` micro-batches."""
    flat = [t for row in rows for t in row]
    sequence = torch.tensor([i for i, row in enumerate(rows) for _ in row], dtype=torch.int64)
    columns = [torch.tensor([t[k] for t in flat], dtype=torch.float64) for k in range(4)]
    logp, (_, prox, behav, advantage) = columns[0].clone().requires_grad_(), columns
    mask = torch.tensor([t[4] for t in flat], dtype=torch.bool)
    counts = aggregation.num_tokens_per_sequence(mask, sequence, len(rows))
    alone = torch.arange(len(rows))  # every trajectory is of a prompt of its own
    n = aggregation.denominator(mode, counts, group_ids_N=alone)
    scale = aggregation.token_scales(mode, mask, sequence, counts, group_ids_N=alone, max_tokens=9)
    total = 0.0
    for k in range(splits if n else 0):
        at = sequence % splits == k
        columns = (logp[at], prox[at], behav[at], advantage[at])
        weight = CORRECTIONS["token_truncate"](*columns[1:3], mask[at], sequence[at], len(rows), low=None, high=cap)
        terms = Terms(*columns, weight, mask[at], sequence[at], len(rows))
        loss = LOSSES["decoupled_ppo"](terms, eps_low=EPS_LOW, eps_high=EPS_HIGH, dual_clip=dual).loss
        part = aggregation.contribution(loss, scale[at], mask[at], 1, n)
        part.backward()
        total += float(part.detach())
    return total, (logp.grad if logp.grad is not None else torch.zeros_like(logp)).tolist()


@settings(max_examples=300, deadline=None)
@given(ragged, st.sampled_from(sorted(aggregation.AGGREGATIONS)), st.floats(0.5, 10), dual_clips, st.integers(1, 4))
def test_a_step_equals_its_plain_loop_for_ragged_masks_and_any_split(rows, mode, cap, dual, splits):
    want, want_slopes = slow_step(rows, mode, cap, dual)
    got, got_slopes = fast_step(rows, mode, cap, dual, splits)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got_slopes, want_slopes, rtol=1e-6, atol=1e-6)
