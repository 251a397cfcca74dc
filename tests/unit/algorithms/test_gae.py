"""GAE over ragged rows against the golden numbers and a loop as the papers write it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from async_rl.algorithms.gae import gae, gae_decoupled, length_adaptive_lambda

from .estimator_cases import bools, cases, close, columns, f64, flat, gammas, lambdas, ragged, sequence_of


def arguments(inputs):
    rewards, values, mask = (flat(inputs[key]) for key in ("rewards", "values", "mask"))
    ends = inputs.get("bootstrap", [0.0] * len(inputs["mask"]))
    return f64(rewards), f64(values), bools(mask), sequence_of(inputs["mask"]), f64(ends)


def slow_gae(rows, bootstrap, gamma, lam):
    """algorithms.md §4.1, one trajectory and one token at a time."""
    advantages, returns = [], []
    for row, end, decay in zip(rows, bootstrap, lam, strict=True):
        nv, acc, back = end, 0.0, []
        for r, v, _, _, m in reversed(row):
            if m:
                acc = r + gamma * nv - v + gamma * decay * acc
                nv = v
            back.append((acc, acc + v) if m else (0.0, 0.0))
        advantages += [a for a, _ in reversed(back)]
        returns += [x for _, x in reversed(back)]
    return advantages, returns


@cases("gae")
def test_gae_is_the_golden_one(inputs, expected, tol):
    advantages, returns = gae(*arguments(inputs), gamma=inputs["gamma"], lam=inputs["lam"])
    close(advantages, flat(expected["adv"]), tol)
    close(returns, flat(expected["returns"]), tol)


@cases("gae_decoupled")
def test_policy_and_critic_may_have_a_lambda_each(inputs, expected, tol):
    lams = {"lam_policy": inputs["lam_policy"], "lam_value": inputs["lam_value"]}
    advantages, returns = gae_decoupled(*arguments(inputs), gamma=inputs["gamma"], **lams)
    close(advantages, flat(expected["adv"]), tol)
    close(returns, flat(expected["returns"]), tol)


@cases("seed_gae_bug_demo")
def test_values_in_the_padding_do_not_leak_backwards(inputs, expected, tol):
    advantages, _ = gae(*arguments(inputs), gamma=inputs["gamma"], lam=inputs["lam"])
    close(advantages, flat(expected["correct"]), tol)
    assert (advantages[:2] - f64(flat(expected["seed_result"]))[:2]).abs().min() > 0.4


@cases("length_adaptive_lambda")
def test_the_lambda_of_a_length_is_the_golden_one(inputs, expected, tol):
    close(length_adaptive_lambda(torch.tensor(inputs["lengths"]), inputs["alpha"]), expected["lam"], tol)


def test_a_trajectory_without_tokens_has_lambda_zero():
    assert length_adaptive_lambda(torch.tensor([0])).tolist() == [0.0]


@settings(max_examples=100, deadline=None)
@given(ragged, gammas, lambdas, lambdas)
def test_gae_equals_its_plain_loop_for_ragged_rows_and_a_lambda_each(rows, gamma, lam, other):
    rewards, values, _, _, mask = columns(rows)
    ends = [0.7 * i - 1 for i in range(len(rows))]
    lams = [lam if i % 2 else other for i in range(len(rows))]
    got = gae(rewards, values, mask, sequence_of(rows), f64(ends), gamma=gamma, lam=f64(lams))
    for ours, want in zip(got, slow_gae(rows, ends, gamma, lams), strict=True):
        np.testing.assert_allclose(ours, want, rtol=1e-6, atol=1e-6)


@settings(max_examples=50, deadline=None)
@given(ragged, lambdas)
def test_garbage_under_the_mask_and_the_order_of_trajectories_change_no_bit(rows, lam):
    ends = f64([0.5 * i for i in range(len(rows))])
    rewards, values, _, _, mask = columns(rows)
    clean = gae(rewards, values, mask, sequence_of(rows), ends, gamma=0.9, lam=lam)
    for garbage in (math.nan, math.inf):
        rewards, values, _, _, mask = columns(rows, garbage=garbage)
        dirty = gae(rewards, values, mask, sequence_of(rows), ends, gamma=0.9, lam=lam)
        assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    turned = rows[::-1]
    rewards, values, _, _, mask = columns(turned)
    there = gae(rewards, values, mask, sequence_of(turned), ends.flip(0), gamma=0.9, lam=lam)
    order = torch.cat([(sequence_of(rows) == i).nonzero().squeeze(1) for i in reversed(range(len(rows)))])
    assert all(torch.equal(a[order], b) for a, b in zip(clean, there, strict=True))


def test_tokens_of_different_trajectories_may_be_interleaved():
    rewards, values = f64([0, 9, 0, 8, 1]), f64([0.5, 1, 0.6, 2, 0.7])
    sequence = torch.tensor([0, 1, 0, 1, 0])
    mixed, _ = gae(rewards, values, bools([1] * 5), sequence, f64([0, 0]), gamma=1.0, lam=0.95)
    close(mixed[sequence == 0], [0.46575, 0.385, 0.3])


def test_one_token_none_and_none_that_is_trainable():
    sequence, mask = torch.tensor([0, 2, 2]), bools([1, 0, 0])
    ends = f64([0.5, math.nan, math.nan])  # nothing follows what is not there
    advantages, returns = gae(f64([1, 7, 7]), f64([0.2, 7, 7]), mask, sequence, ends, gamma=0.5, lam=0.9)
    close(advantages, [1.05, 0, 0])
    close(returns, [1.25, 0, 0])
    nothing = f64([])
    for x in gae(nothing, nothing, bools([]), torch.zeros(0, dtype=torch.int64), f64([0, 0]), gamma=1.0, lam=1.0):
        assert len(x) == 0


def test_estimates_are_constants_and_a_nan_at_a_trainable_token_is_not_hidden():
    values = f64([0.5, 0.6]).requires_grad_()
    sequence, mask = torch.tensor([0, 0]), bools([1, 1])
    advantages, returns = gae(f64([0, 1]), values, mask, sequence, f64([0]), gamma=1.0, lam=1.0)
    assert not advantages.requires_grad
    assert not returns.requires_grad
    bad, _ = gae(f64([0, math.nan]), values, mask, sequence, f64([0]), gamma=1.0, lam=1.0)
    assert bad.isnan().all()


def test_shapes_and_trajectories_that_do_not_fit_are_refused():
    two, mask, sequence = f64([0, 1]), bools([1, 1]), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"values has shape \(1,\), but rewards has shape \(2,\)"):
        gae(two, two[:1], mask, sequence, f64([0, 0]), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"trajectories 0 \.\. 1, but there are 1"):
        gae(two, two, mask, sequence, f64([0]), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"lam has shape \(3,\), but there are 2 trajectories"):
        gae(two, two, mask, sequence, f64([0, 0]), gamma=1.0, lam=f64([1, 1, 1]))
