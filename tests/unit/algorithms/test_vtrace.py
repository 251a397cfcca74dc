"""V-trace against the golden numbers, the double sum of the paper, and GAE where nothing is off-policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.gae import gae
from async_rl.algorithms.vtrace import vtrace

from .estimator_cases import bools, cases, close, columns, f64, gammas, lambdas, ragged, sequence_of

one = torch.zeros(1, dtype=torch.int64)


@cases("vtrace")
def test_vtrace_is_the_golden_one(inputs, expected, tol):
    log_rho, mask = f64(inputs["log_rho"]), bools(inputs["mask"])
    options = {key: inputs[key] for key in ("gamma", "lam", "rho_bar", "c_bar", "pg_rho_bar")}
    args = (f64(inputs["rewards"]), f64(inputs["values"]), mask, one.repeat(len(mask)), f64([inputs["bootstrap"]]))
    got = vtrace(log_rho, torch.zeros_like(log_rho), *args, **options)
    close(got.targets, expected["vs"], tol)
    close(got.pg_advantages, expected["pg_adv"], tol)
    close(got.advantages, expected["adv_unweighted"], tol)


def noisy(inputs, **options) -> float:
    """What of a reward 1 after n noisy tokens reaches the first of them."""
    n = inputs["n"]
    log_rho = f64([math.log(inputs["ratio_hi"]), math.log(inputs["ratio_lo"])] * (n // 2) + [0.0])
    zeros = torch.zeros_like(log_rho)
    rewards, sequence = f64([0.0] * n + [1.0]), one.repeat(n + 1)
    got = vtrace(log_rho, zeros, rewards, zeros, bools([1] * (n + 1)), sequence, f64([0]), gamma=1.0, rho_bar=2.0, **options)
    return float(got.targets[0])


@cases("trace_product")
def test_noise_shortens_the_trace_unless_the_bound_leaves_room_for_it(inputs, expected, tol):
    close([noisy(inputs, c_bar=c_bar) for c_bar in inputs["c_bar"]], expected["product"], tol)
    assert noisy(inputs, c_bar=1.0, dead_zone=0.05) == 1.0
    assert noisy(inputs, c_bar=1.05, max_trace=1.05) == pytest.approx(1.0)


def slow_vtrace(row, end, gamma, lam, bars, max_trace):
    """IMPALA's definition: a sum over k of discounted products of c, on the trainable tokens alone."""
    rho_bar, c_bar, pg_bar = bars
    kept = [(r, v, math.exp(p - b)) for r, v, p, b, m in row if m]
    n = len(kept)
    values = [v for _, v, _ in kept] + [end]
    delta = [min(rho_bar, kept[t][2]) * (kept[t][0] + gamma * values[t + 1] - values[t]) for t in range(n)]
    c = [min(c_bar, rho) for _, _, rho in kept]
    for t in reversed(range(n)):  # the largest c_t for which no product that starts at t passes the bound
        products = [math.prod(c[t + 1 : k]) for k in range(t + 1, n + 1)]
        c[t] = min(c[t], max_trace / max(products)) if max_trace else c[t]
    vs = [
        values[t] + math.fsum(gamma ** (k - t) * lam ** (k - t) * math.prod(c[t:k]) * delta[k] for k in range(t, n))
        for t in range(n)
    ] + [end]
    raw = [kept[t][0] + gamma * (lam * vs[t + 1] + (1 - lam) * values[t + 1]) - values[t] for t in range(n)]
    return vs[:-1], [min(pg_bar, kept[t][2]) * a for t, a in enumerate(raw)], raw


@settings(max_examples=100, deadline=None)
@given(ragged, gammas, lambdas, st.floats(0.5, 3), st.floats(0.1, 1), st.floats(0.5, 3), st.sampled_from([None, 1.0, 1.5]))
def test_vtrace_equals_the_double_sum_of_the_paper(rows, gamma, lam, rho_bar, share, pg_bar, max_trace):
    rewards, values, prox, behav, mask = columns(rows)
    ends = [0.5 * i - 1 for i in range(len(rows))]
    bars = (rho_bar, share * rho_bar, pg_bar)
    options = {"rho_bar": bars[0], "c_bar": bars[1], "pg_rho_bar": bars[2], "max_trace": max_trace}
    got = vtrace(prox, behav, rewards, values, mask, sequence_of(rows), f64(ends), gamma=gamma, lam=lam, **options)
    wants = [slow_vtrace(row, end, gamma, lam, bars, max_trace) for row, end in zip(rows, ends, strict=True)]
    for k, ours in enumerate(got):
        np.testing.assert_allclose(ours[mask], [x for want in wants for x in want[k]], rtol=1e-6, atol=1e-6)
        assert not ours[~mask].any()


@settings(max_examples=50, deadline=None)
@given(ragged, gammas, lambdas)
def test_on_policy_it_is_gae(rows, gamma, lam):
    rewards, values, prox, _, mask = columns(rows)
    at, lams = (mask, sequence_of(rows), f64([0.3] * len(rows))), f64([lam / (i + 1) for i in range(len(rows))])
    got = vtrace(prox, prox, rewards, values, *at, gamma=gamma, lam=lams)
    advantages, returns = gae(rewards, values, *at, gamma=gamma, lam=lams)
    for ours, want in zip(got, (returns, advantages, advantages), strict=True):
        np.testing.assert_allclose(ours, want, rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(ragged)
def test_garbage_under_the_mask_changes_no_bit(rows):
    ends = f64([1.0] * len(rows))
    outs = []
    for garbage in (None, math.nan, -math.inf):
        rewards, values, prox, behav, mask = columns(rows, garbage=garbage)
        outs.append(vtrace(prox, behav, rewards, values, mask, sequence_of(rows), ends, gamma=0.9, c_bar=0.9, max_trace=2.0))
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


def test_a_huge_ratio_stays_finite_and_bounds_that_make_no_sense_are_refused():
    x, mask = f64([0.0, -1000.0]), bools([1, 1])
    args = (f64([0, 1]), f64([0, 0]), mask, one.repeat(2), f64([0]))
    got = vtrace(x, x.flip(0), *args, gamma=1.0, rho_bar=1e12, pg_rho_bar=1e12, c_bar=1e12)
    assert all(y.isfinite().all() for y in got)
    for options, what in (
        ({"c_bar": 2.0}, "c_bar is 2.0"),
        ({"c_bar": 0.0}, "c_bar is 0.0"),
        ({"max_trace": 0.5}, "max_trace"),
    ):
        with pytest.raises(ValueError, match=what):
            vtrace(x, x, *args, gamma=1.0, **options)


@pytest.mark.parametrize(
    ("ratios", "reached"),
    [((1.5, 1.5, 1.5, 1.5, 1.0), (2, 2, 2, 1.5, 1)), ((8.0, 0.25, 2.0, 1.0), (1, 0.5, 2, 1)), ((0.5, 4.0, 1.0), (1, 2, 1))],
)
def test_no_product_of_successive_ratios_passes_the_bound_wherever_it_starts_or_ends(ratios, reached):
    log_rho, n = f64(ratios).log(), len(ratios)
    zeros, rewards = torch.zeros_like(log_rho), f64([0.0] * (n - 1) + [1.0])
    options = {"gamma": 1.0, "rho_bar": 8.0, "c_bar": 8.0, "max_trace": 2.0}
    got = vtrace(log_rho, zeros, rewards, zeros, bools([1] * n), one.repeat(n), f64([0]), **options)
    close(got.targets, reached)
