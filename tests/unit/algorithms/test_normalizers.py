"""Running reward statistics: the article's rule, the debiased one, and what a checkpoint must keep."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.normalizers import NORMALIZERS, normalize
from async_rl.algorithms.whitening import moments

from .estimator_cases import bools, cases, close, f64, number

batches = st.lists(st.lists(st.one_of(number, st.sampled_from([0.0, 1.0])), max_size=4), min_size=1, max_size=6)


def replay(name, all_batches, momentum, clip=5.0):
    """(normalized, statistics) after each batch."""
    state, out = {}, []
    for batch in all_batches:
        rewards, valid = f64(batch), bools([1] * len(batch))
        state = NORMALIZERS[name].update(state, moments(rewards, valid), momentum)
        statistics = NORMALIZERS[name].statistics(state)
        out.append((normalize(rewards, valid, statistics, clip=clip), statistics))
    return out


@cases("reward_normalizer_seed")
def test_the_rule_of_the_article_is_the_golden_one(inputs, expected, tol):
    got = replay("ema", inputs["batches"], inputs["momentum"], inputs["clip"])
    for (ours, statistics), want, state in zip(got, expected["normalized"], expected["state"], strict=True):
        close(ours, want, tol)
        close(statistics, state, tol)


@cases("reward_normalizer_ewma")
def test_the_debiased_rule_is_the_golden_one(inputs, expected, tol):
    got = replay("debiased_ema", inputs["batches"], inputs["momentum"], inputs["clip"])
    for (ours, statistics), want, state in zip(got, expected["normalized"], expected["state"], strict=True):
        close(ours, want, tol)
        close(statistics, state, tol)


@settings(max_examples=100, deadline=None)
@given(batches, st.floats(0, 0.99))
def test_the_debiased_rule_is_a_weighted_mean_over_all_batches_so_far(all_batches, momentum):
    kept = [b for b in all_batches if b]
    weights = [momentum ** (len(kept) - 1 - k) for k in range(len(kept))]
    _, (mean, variance) = replay("debiased_ema", all_batches, momentum)[-1]
    if not kept:
        assert (mean, variance) == (0.0, 1.0)
        return
    first, second = (
        math.fsum(w * math.fsum(x**n for x in b) / len(b) for w, b in zip(weights, kept, strict=True)) / math.fsum(weights)
        for n in (1, 2)
    )
    np.testing.assert_allclose([mean, variance], [first, second - first**2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NORMALIZERS)
@settings(max_examples=50, deadline=None)
@given(all_batches=batches)
def test_a_state_through_a_checkpoint_and_moments_from_several_ranks_give_the_same(name, all_batches):
    state, again, update = {}, {}, NORMALIZERS[name].update
    for batch in all_batches:
        x = f64(batch)
        parts = [moments(part, bools([1] * len(part))) for part in (x[::2], x[1::2])]
        state = update(state, moments(x, bools([1] * len(batch))), 0.9)
        again = update(json.loads(json.dumps(again)), parts[0] + parts[1], 0.9)
    assert again == pytest.approx(state, abs=1e-9)
    assert all(math.isfinite(x) for x in NORMALIZERS[name].statistics(state))


@pytest.mark.parametrize("name", NORMALIZERS)
def test_one_reward_is_no_nan_and_the_first_success_no_explosion(name):
    outs = replay(name, [[1.0], [1.0], [0.0]], 0.9)
    assert all(out.isfinite().all() for out, _ in outs)
    got = replay(name, [[0.0] * 4, [0.0] * 4, [0.0, 0.0, 0.0, 1e-4]], 0.9)[-1][0]
    assert got.abs().max() < 0.1  # a std near 0 would make it the clip


def test_scale_alone_keeps_sign_and_zero_and_an_invalid_reward_is_left_out():
    rewards, valid = f64([0.0, 4.0, -100.0, math.nan]), bools([1, 1, 1, 0])
    close(normalize(rewards, valid, (3.0, 4.0), scale_only=True), [0, 2, -5, 0], 1e-7)
    close(normalize(rewards, valid, (3.0, 4.0)), [-1.5, 0.5, -5, 0], 1e-7)
    assert torch.equal(moments(rewards, valid), moments(rewards[:3], valid[:3]))
    with pytest.raises(ValueError, match="valid has shape"):
        normalize(rewards, valid[:1], (0.0, 1.0))
