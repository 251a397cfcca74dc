"""Whitening, the REINFORCE++ that rests on it, and the blend of two advantages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.advantages import ADVANTAGES
from async_rl.algorithms.reinforce import discounted_returns, reinforce_pp, reinforce_pp_baseline
from async_rl.algorithms.whitening import blend, moments, whiten

from .estimator_cases import bools, cases, close, columns, f64, flat, gammas, number, ragged, sequence_of

values = st.lists(st.tuples(number, st.booleans()), min_size=1, max_size=20)


def slow_whiten(x, mask, ddof, eps):
    kept = [v for v, m in zip(x, mask, strict=True) if m]
    mean = math.fsum(kept) / max(1, len(kept))
    variance = math.fsum((v - mean) ** 2 for v in kept) / max(1, len(kept) - ddof)
    flat_batch = variance < 1e-12
    return [(v - mean) / math.sqrt(variance + eps) if m and not flat_batch else 0.0 for v, m in zip(x, mask, strict=True)]


@cases("masked_whiten")
def test_whitening_is_the_golden_one(inputs, expected, tol):
    got = whiten(f64(flat(inputs["x"])), bools(flat(inputs["mask"])), ddof=inputs["ddof"], eps=inputs["eps"])
    close(got, flat(expected["y"]), tol)


@settings(max_examples=100, deadline=None)
@given(values, st.sampled_from([0, 1]))
def test_whitening_equals_its_plain_loop(rows, ddof):
    x, mask = [row[0] for row in rows], [row[1] for row in rows]
    got = whiten(f64(x), bools(mask), ddof=ddof)
    np.testing.assert_allclose(got, slow_whiten(x, mask, ddof, 1e-8), rtol=1e-6, atol=1e-6)


def test_ranks_that_add_their_moments_whiten_as_one():
    x, mask = f64([1, 2, 99, 3, 4, 10]), bools([1, 1, 0, 1, 1, 1])
    together = moments(x[:4], mask[:4]) + moments(x[4:], mask[4:])
    parts = [whiten(x[at], mask[at], together) for at in (slice(0, 4), slice(4, 6))]
    close(torch.cat(parts), whiten(x, mask), 1e-12)
    assert (whiten(x[:4], mask[:4]) - parts[0]).abs().max() > 0.1  # what moments of one's own would give


@pytest.mark.parametrize("value", [0.7, 0.0, -3.3, 1e9 + 0.1, 1e12 + 0.1])
def test_an_equal_batch_is_whitened_to_exactly_zero(value):
    assert not whiten(f64([value] * 7), bools([1] * 7)).any()


def test_one_entry_no_entry_and_garbage_under_the_mask():
    assert whiten(f64([5.0, 1.0]), bools([1, 0])).tolist() == [0, 0]
    assert whiten(f64([]), bools([])).tolist() == []
    assert whiten(f64([math.nan]), bools([0])).tolist() == [0]
    mask = bools([1, 0, 1])
    assert torch.equal(whiten(f64([1, math.nan, 2]), mask), whiten(f64([1, 0, 2]), mask))
    assert whiten(f64([1, math.nan, 1]), bools([1, 1, 1])).isnan().all()


@cases("reinforce_pp")
def test_reinforce_pp_is_the_golden_one(inputs, expected, tol):
    at = (bools(flat(inputs["mask"])), sequence_of(inputs["mask"]), len(inputs["mask"]))
    advantages, returns = reinforce_pp(f64(flat(inputs["token_rewards"])), *at, gamma=inputs["gamma"], eps=inputs["eps"])
    close(advantages, flat(expected["adv"]), tol)
    close(returns, flat(expected["returns"]), tol)


@cases("reinforce_pp_baseline")
def test_reinforce_pp_with_a_group_baseline_is_the_golden_one(inputs, expected, tol):
    rewards = f64(inputs["rewards"])
    mask, sequence = bools(flat(inputs["mask"])), sequence_of(inputs["mask"])
    valid = torch.ones(len(rewards), dtype=torch.bool)
    centered = ADVANTAGES["reinforce_pp_baseline"](rewards, torch.tensor(inputs["group"]), valid)
    close(reinforce_pp_baseline(centered, mask, sequence, eps=inputs["eps"]), flat(expected["adv"]), tol)


@settings(max_examples=100, deadline=None)
@given(ragged, gammas)
def test_reinforce_pp_equals_its_plain_loop(rows, gamma):
    rewards, _, _, _, mask = columns(rows, garbage=math.nan)
    want = []
    for row in rows:
        total, back = 0.0, []
        for r, _, _, _, m in reversed(row):
            total = r + gamma * total if m else total
            back.append(total if m else 0.0)
        want += reversed(back)
    advantages, returns = reinforce_pp(rewards, mask, sequence_of(rows), len(rows), gamma=gamma)
    np.testing.assert_allclose(returns, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(advantages, slow_whiten(want, mask.tolist(), 1, 1e-8), rtol=1e-6, atol=1e-6)
    assert torch.equal(returns, discounted_returns(rewards, mask, sequence_of(rows), len(rows), gamma=gamma))


def test_two_advantages_are_blended_at_unit_std_and_the_ends_are_the_one_and_the_other():
    grpo, gae, mask = f64([1, -1, 3, math.nan]), f64([10, 20, 40, math.nan]), bools([1, 1, 1, 0])
    ends = [blend(grpo, gae, mask, a) for a in (0.0, 1.0)]
    for end, own in zip(ends, (grpo, gae), strict=True):
        assert float(end[mask].std()) == pytest.approx(1)
        close(end[mask] / end[0], own[mask] / own[0])
        assert float(end[3]) == 0
    close(blend(grpo, gae, mask, 0.25), 0.75 * ends[0] + 0.25 * ends[1])
    close(blend(f64([2, 2, 2, 0]), gae, mask, 0.5), 0.5 * ends[1])
    together = torch.stack([moments(x, mask) for x in (grpo, gae)])
    close(blend(grpo[:2], gae[:2], mask[:2], 0.25, together), blend(grpo, gae, mask, 0.25)[:2])
