"""Schedules over steps: learning rate, from GRPO to PPO, group sizes, and the dealing of a budget of answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms import diagnostics
from async_rl.algorithms.schedules import allocate_answers, group_size_at, hybrid_at, lr_at, num_prompts, vcpo_lr_scale

from .estimator_cases import cases, close

STEPS = 100  # the golden cases count in hundredths of a run


@cases("lr_schedule")
def test_the_learning_rate_is_the_golden_one_at_every_listed_step(inputs, expected, tol):
    args = [inputs[key] for key in ("total_steps", "peak", "warmup_frac", "hold_frac", "min_ratio")]
    got = [lr_at(step, *args) for step in inputs["steps"]]
    np.testing.assert_allclose(got, expected["lr"], rtol=0, atol=tol)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 1))
def test_the_learning_rate_starts_above_zero_stays_within_its_bounds_and_ends_at_the_minimum(total, warmup, hold, floor):
    rates = [lr_at(t, total, 1.0, warmup, hold, floor) for t in range(total + 1)]
    assert all(0 < rate <= 1 + 1e-12 for rate in rates[:total] if floor > 0)
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(floor)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_without_warm_up_the_first_step_is_still_one_of_warm_up_at_the_peak():
    assert [lr_at(t, 3, 1.0, 0.0, 0.0, 0.0) for t in (0, 1, 3)] == [1.0, 1.0, 0.0]


@cases("hybrid_schedule")
def test_the_way_from_grpo_to_ppo_is_the_golden_one(inputs, expected, tol):
    options = {key: inputs[key] for key in ("grpo_end", "ppo_start", "clip_grpo", "clip_start", "clip_end")}
    for progress, want in zip(inputs["progress"], expected["out"], strict=True):
        got = hybrid_at(round(progress * STEPS), STEPS, **options)
        assert got.phase == want["phase"]
        close([got.ppo_weight, got.clip], [want["ppo_weight"], want["cliprange"]], tol)


def test_the_way_from_grpo_to_ppo_has_a_beginning_an_end_and_no_turn():
    weights = [hybrid_at(t, 37).ppo_weight for t in range(60)]
    assert (weights[0], weights[-1]) == (0.0, 1.0)
    assert weights == sorted(weights)
    with pytest.raises(ValueError, match=r"grpo_end is 0\.7"):
        hybrid_at(0, 1, grpo_end=0.7)


@cases("group_size_schedule")
def test_group_sizes_are_the_golden_ones(inputs, expected, tol):
    got = [group_size_at(round(x * STEPS), STEPS, inputs["start"], inputs["end"]) for x in inputs["progress"]]
    assert got == expected["group_size"]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 50), st.integers(2, 5), st.integers(0, 4), st.booleans())
def test_group_sizes_go_one_way_in_equal_stages_and_the_batch_stays_as_large(total, small, doublings, down):
    start, end = (small << doublings, small) if down else (small, small << doublings)
    sizes = [group_size_at(t, total * (doublings + 1), start, end) for t in range(total * (doublings + 1) + 3)]
    assert (sizes[0], sizes[-1]) == (start, end)
    assert sizes == sorted(sizes, reverse=down)
    assert all(sizes.count(small << k) >= total for k in range(doublings + 1))
    answers = (small << doublings) * 3
    assert {num_prompts(answers, size) * size for size in sizes} == {answers}


@pytest.mark.parametrize(("start", "end"), [(4, 12), (1, 4), (0, 4), (4, 6), (3, 4)])
def test_group_sizes_that_no_doubling_connects_are_refused(start, end):
    with pytest.raises(ValueError, match=f"group sizes {start} and {end}"):
        group_size_at(0, 10, start, end)
    with pytest.raises(ValueError, match="a batch of 10 answers"):
        num_prompts(10, 4)


@cases("zero_variance_probability")
def test_small_groups_of_hard_prompts_are_mostly_of_one_reward(inputs, expected, tol):
    for p, row in zip(inputs["p"], expected["prob"], strict=True):
        close([p**g + (1 - p) ** g for g in inputs["G"]], row, tol)


bounds = st.integers(1, 4).flatmap(lambda low: st.tuples(st.just(low), st.integers(low, low + 12)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), bounds, st.data())
def test_a_budget_is_dealt_whole_within_its_bounds_and_more_goes_where_there_was_less_signal(signals, low_high, data):
    low, high = low_high
    budget = data.draw(st.integers(low * len(signals), high * len(signals)))
    sizes = allocate_answers(signals, budget, low, high)
    assert sum(sizes) == budget
    assert all(low <= size <= high for size in sizes)
    for a, more in zip(signals, sizes, strict=True):
        for b, less in zip(signals, sizes, strict=True):
            assert a > b or more >= less - (a == b)


def test_the_dealt_sizes_are_as_one_over_one_plus_signals():
    assert allocate_answers([0, 1, 3], 28, 1, 28) == [16, 8, 4]
    assert allocate_answers([0, 1, 3], 28, 4, 12) == [12, 11, 5]
    assert allocate_answers([5, 5], 4, 2, 2) == [2, 2]


@pytest.mark.parametrize(("budget", "low", "high"), [(3, 2, 8), (17, 2, 8), (4, 0, 8), (4, 3, 2)])
def test_a_budget_that_the_bounds_do_not_admit_is_refused(budget, low, high):
    with pytest.raises(ValueError, match=f"{budget} answers cannot be dealt to 2 prompts"):
        allocate_answers([0, 0], budget, low, high)


@cases("vcpo_lr_scale")
def test_the_learning_rate_falls_with_the_root_of_the_effective_sample_size(inputs, expected, tol):
    w = np.asarray(inputs["w"])
    ess = diagnostics.ess(float(w.mean()), float((w**2).mean()))
    assert inputs["base_lr"] * vcpo_lr_scale(ess) == pytest.approx(expected["lr"], abs=tol)
    assert [vcpo_lr_scale(x) for x in (0.0, 1.0, 1.0 + 1e-12)] == [0.0, 1.0, 1.0]


@cases("seed_table_consistency")
def test_the_table_of_the_article_does_not_say_thirty_per_cent(inputs, expected, tol):
    hours = [steps / rate / 3600 for steps, rate in zip(inputs["steps"], inputs["steps_per_s"], strict=True)]
    close(hours, expected["hours"], tol)
    close(1 - hours[2] / hours[0], expected["hybrid_saving_vs_ppo"], tol)


@cases("staleness_capacity")
def test_the_capacity_of_areal_is_as_the_sheet_says(inputs, expected, tol):
    got = [min(conc - run, (eta + v + 1) * b - (accepted + run)) for eta, v, b, accepted, run, conc in inputs["cases"]]
    assert got == expected["capacity"]
