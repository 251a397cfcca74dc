"""The critic's loss with its gradient, and PopArt, which must not change what the critic says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.critic import SIGMA_BOUNDS, PopArt, explained_variance, popart_update, value_loss
from async_rl.algorithms.whitening import moments

from .estimator_cases import bools, cases, close, f64, number

rows = st.lists(st.tuples(number, number, number, st.booleans()), min_size=1, max_size=12)


@cases("value_loss")
def test_the_value_loss_is_the_golden_one(inputs, expected, tol):
    mask = bools(inputs["mask"])
    got = value_loss(f64(inputs["vpred"]), f64(inputs["v_old"]), f64(inputs["returns"]), mask, clip=inputs["clip"])
    close(got.loss, expected["loss"], tol)
    close(got.loss.sum() / mask.sum(), expected["masked_mean"], tol)
    close(got.clipped[mask].double().mean(), expected["clipfrac"], tol)


def slow_value_loss(v, old, r, clip):
    """(loss, its derivative by v) of one token."""
    plain, bounded = (v - r) ** 2, (max(old - clip, min(old + clip, v)) - r) ** 2
    return (plain / 2, v - r) if plain >= bounded else (bounded / 2, 0.0)


@settings(max_examples=100, deadline=None)
@given(rows, st.sampled_from([0.2, 0.5, None]))
def test_loss_and_gradient_equal_their_plain_loop_whatever_is_under_the_mask(table, clip):
    mask = bools([row[3] for row in table])
    values, old, returns = (torch.where(mask, f64([row[k] for row in table]), math.nan) for k in range(3))
    values.requires_grad_()
    got = value_loss(values, old, returns, mask, clip=clip)
    got.loss.sum().backward()
    assert values.grad is not None
    want = [slow_value_loss(v, old, r, clip or 1e9) if m else (0.0, 0.0) for v, old, r, m in table]
    np.testing.assert_allclose(got.loss.detach(), [x for x, _ in want], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(values.grad, [x for _, x in want], rtol=1e-6, atol=1e-6)


def test_a_nan_value_stays_visible_and_constants_with_gradient_are_refused():
    x, mask = f64([1.0]), bools([1])
    assert value_loss(f64([math.nan]), x, x, mask, clip=0.2).loss.isnan().all()
    for old, returns, name in ((x.clone().requires_grad_(), x, "old_values"), (x, x.clone().requires_grad_(), "returns")):
        with pytest.raises(ValueError, match=f"{name} carries gradient"):
            value_loss(x, old, returns, mask, clip=0.2)
    with pytest.raises(ValueError, match="returns has shape"):
        value_loss(x, x, f64([1, 2]), mask, clip=0.2)


@cases("explained_variance")
def test_explained_variance_is_the_golden_one(inputs, expected, tol):
    returns, values = np.asarray(inputs["returns"]), np.asarray(inputs["values"])
    close(explained_variance(float(returns.var()), float((returns - values).var())), expected["ev"], tol)
    assert explained_variance(0.0, 1.0) == 0


@cases("popart_update")
def test_popart_is_the_golden_one_and_keeps_what_the_critic_says(inputs, expected, tol):
    targets, old = f64(inputs["targets"]), PopArt(inputs["mu"], inputs["nu"])
    new, scale, shift = popart_update(old, moments(targets, bools([1] * len(targets))), beta=inputs["beta"])
    w, b = scale * inputs["w"], scale * inputs["b"] + shift
    close([new.mu, new.nu, new.sigma, w, b], [expected[key] for key in ("mu", "nu", "sigma", "w", "b")], tol)
    before = old.sigma * (inputs["w"] * inputs["h"] + inputs["b"]) + old.mu
    after = new.sigma * (w * inputs["h"] + b) + new.mu
    close([before, after], [expected[f"unnormalised_output_h3_{when}"] for when in ("before", "after")], tol)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(number, max_size=4), max_size=6), number, number, number)
def test_after_any_batches_the_output_is_what_it_was(batches, w, b, h):
    state, said = PopArt(), w * h + b
    for batch in batches:
        state, scale, shift = popart_update(state, moments(f64(batch), bools([1] * len(batch))), beta=0.1)
        w, b = scale * w, scale * b + shift
        assert state.sigma >= SIGMA_BOUNDS[0]
    assert state.sigma * (w * h + b) + state.mu == pytest.approx(said, abs=1e-6)


def test_popart_comes_to_the_mean_and_std_of_its_targets_and_ignores_an_empty_batch():
    state = PopArt()
    for _ in range(300):
        state, _, _ = popart_update(state, moments(f64([1, 3]), bools([1, 1])), beta=0.1)
    assert (state.mu, state.sigma) == (pytest.approx(2), pytest.approx(1))
    assert popart_update(state, moments(f64([5]), bools([0])), beta=0.1) == (state, 1.0, 0.0)
    for _ in range(2000):
        state, _, _ = popart_update(state, moments(f64([7]), bools([1])), beta=0.1)
    assert state.sigma == pytest.approx(SIGMA_BOUNDS[0], rel=1e-2)
