"""Every figure that a run reports, on the golden cases, merged over micro-batches, and of nothing at all."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from async_rl.algorithms import diagnostics
from async_rl.algorithms.corrections import CORRECTIONS, LEVELS, MODES, cut
from async_rl.algorithms.diagnostics import Stats

from .estimator_cases import bools, cases, close, columns, f64, ragged, sequence_of


def row(*stats: Stats) -> dict[str, float]:
    """Means over all the parts of a step, as the learner's tally takes them."""
    sums: dict[str, list[float]] = {}
    for part in stats:
        for name, (value, count) in part.means.items():
            pair = sums.setdefault(name, [0.0, 0.0])
            pair[0] += float(value)
            pair[1] += float(count)
    return {name: value / count for name, (value, count) in sums.items() if count}


@cases("ess_fraction")
def test_the_effective_sample_size_is_the_golden_one(inputs, expected, tol):
    w = np.asarray(inputs["w"])
    close(diagnostics.ess(float(w.mean()), float((w**2).mean())), expected["ess"], tol)
    assert diagnostics.ess(0.0, 0.0) == 0


@cases("ratio_percentiles")
def test_percentiles_are_the_golden_ones_and_those_of_nothing_are_left_out(inputs, expected, tol):
    got = diagnostics.ratio_percentiles(np.asarray(inputs["ratios"], np.float32), "is/ratio")
    close([got[f"is/ratio_p{q:02}"] for q in inputs["q"]], expected["p"], 1e-6)
    close([got["is/ratio_min"], got["is/ratio_max"]], [expected["min"], expected["max"]], tol)
    assert diagnostics.ratio_percentiles(np.zeros(0), "is/ratio") == {}


@cases("clip_fractions")
def test_the_share_outside_the_range_counts_both_signs(inputs, expected, tol):
    logp = f64(inputs["ratios"]).log()
    bounds = {key: inputs[key] for key in ("eps_low", "eps_high")}
    got = diagnostics.outside(logp, torch.zeros_like(logp), bools([1] * len(logp)), **bounds)
    close(row(got)["ppo/ratio_outside"], expected["outside"], tol)


@cases("staleness_hist")
def test_staleness_is_the_golden_one(inputs, expected, tol):
    got = diagnostics.staleness([np.asarray(inputs["token_versions"])], inputs["current_version"], inputs["overflow_bin"])
    assert got["staleness/hist"] == expected["hist"]
    close(got["staleness/mean"], expected["mean"], tol)
    assert got["staleness/max"] == expected["max"]
    assert got["staleness/versions_per_traj"] == expected["n_versions"]


def test_staleness_counts_versions_by_trajectory_and_refuses_one_from_the_future():
    got = diagnostics.staleness([np.array([3, 3, 2]), np.array([3]), np.zeros(0, np.int32)], 3, 2)
    assert got == {
        "staleness/hist": [3, 1, 0],
        "staleness/mean": 0.25,
        "staleness/max": 1,
        "staleness/versions_per_traj": 1.5,
    }
    assert diagnostics.staleness([], 3, 1)["staleness/hist"] == [0, 0]
    with pytest.raises(ValueError, match="lag -1"):
        diagnostics.staleness([np.array([4])], 3, 2)


@cases("zero_variance_fraction")
def test_groups_that_can_teach_are_those_counted_less_those_of_one_reward(inputs, expected, tol):
    by_group: dict[int, list[float]] = {}
    for reward, group in zip(inputs["rewards"], inputs["group"], strict=True):
        by_group.setdefault(group, []).append(reward)
    got = diagnostics.groups(list(by_group.values()))
    close(got["group/zero_var_frac"], expected["fraction_of_groups"], tol)
    close(got["group/all_correct_frac"], expected["all_correct_fraction"], tol)
    close(got["group/all_wrong_frac"], expected["all_wrong_fraction"], tol)
    assert (got["group/num_counted"], got["group/num_singleton"], got["group/eff_groups"]) == (3, 1, 1)


@cases("pass_at_k")
def test_pass_at_k_is_the_golden_one(inputs, expected, tol):
    close(diagnostics.pass_at_k(inputs["n"], inputs["c"], inputs["k"]), expected["value"], tol)
    rewards = [1.0] * inputs["c"] + [0.0] * (inputs["n"] - inputs["c"])
    close(diagnostics.passes([rewards], [inputs["k"]])[f"pass@{inputs['k']}"], expected["value"], tol)


def test_pass_at_k_is_over_groups_that_are_large_enough_and_refuses_what_is_not_defined():
    got = diagnostics.passes([[1, 0], [0, 0], [1]], [1, 2, 3])
    assert got == {"pass@1": pytest.approx(0.5), "pass@2": 0.5}
    for n, c, k in ((4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)):
        with pytest.raises(ValueError, match=f"pass@{k} of {n} answers"):
            diagnostics.pass_at_k(n, c, k)


@cases("length_stats")
def test_length_figures_are_the_golden_ones(inputs, expected, tol):
    got = diagnostics.lengths(inputs["lengths"], inputs["finish"], inputs["correct"])
    names = {"mean": "len/mean", "mean_correct": "len/mean_correct", "mean_incorrect": "len/mean_incorrect"}
    for golden, ours in (names | {"truncated_fraction": "truncated_frac"}).items():
        close(got[ours], expected[golden], tol)
    close(got["len/p95"], 38.5, tol)
    assert diagnostics.lengths([1, 2, 3, 4], ["abort", "stop", "stop", "length"], [0, 1, 0, 0])["aborted_frac"] == 0.25
    assert set(diagnostics.lengths([], [], []).values()) == {0.0}


def test_mismatch_is_split_by_lag_and_the_last_bucket_holds_the_rest():
    learner, behav = f64([0.1, 0.2, 0.4, 0.8, 9.0]), f64([0.0] * 5)
    mask, lags = bools([1, 1, 1, 1, 0]), torch.tensor([0, 1, 2, 7, 0])
    stats = diagnostics.mismatch_by_lag(learner, behav, mask, lags, 2)
    got = row(stats)
    assert [got[f"mismatch/abs_{which}"] for which in ("lag0", "lag1", "lag2+")] == pytest.approx([0.1, 0.2, 0.6])
    assert float(stats.maxima["mismatch/abs_max_lag2+"]) == pytest.approx(0.8)
    for name in ("k1", "k3", "mult_prob_err", "chi2"):
        assert f"mismatch/{name}_lag1" in got
    none = diagnostics.mismatch_by_lag(learner, behav, mask & False, lags, 2)
    assert row(none) == {}
    assert list(none.means) == list(stats.means)


SHARES = {  # of ratios (.25, 4), (1, 1), (3, 1), whose products are 1, 1, 3 and geometric means 1, 1, 1.73
    "token": {"none": (0, 0), "truncate": (2 / 6, 0), "clip": (2 / 6, 1 / 6), "mask": (2 / 6, 1 / 6)},
    "sequence": {"none": (0, 0), "truncate": (2 / 6, 0), "clip": (2 / 6, 0), "mask": (2 / 6, 0)},
    "geometric": {"none": (0, 0), "truncate": (0, 0), "clip": (0, 0), "mask": (0, 0)},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_counts_as_cut_where_it_is_not_the_ratio_of_its_level(level: str, mode: str):
    prox = f64([0.25, 4.0, 1.0, 1.0, 3.0, 1.0, 9.0]).log()
    behav, mask, sequence = torch.zeros_like(prox), bools([1] * 6 + [0]), torch.tensor([0, 0, 1, 1, 2, 2, 2])
    args, bounds = (prox, behav, mask, sequence, 3), {"low": 0.5, "high": 2.0}
    weight = CORRECTIONS[f"{level}_{mode}"](*args, **bounds)
    high, low = cut(*args, level=level, mode=mode, **bounds)
    assert torch.equal(high | low, weight != CORRECTIONS[f"{level}_none"](*args, **bounds))
    for scaled in (weight, weight / 3):
        got = row(diagnostics.correction(scaled, high, low, mask))
        assert (got["is/trunc_frac_high"], got["is/trunc_frac_low"]) == pytest.approx(SHARES[level][mode])


def test_sequence_figures_are_of_products_and_of_whole_trajectories():
    prox = f64([2.0, 1.5, 0.5, 1.0, 1e-9]).log()
    behav, sequence = torch.zeros_like(prox), torch.tensor([0, 0, 2, 3, 1])
    mask, weight = bools([1, 1, 1, 1, 0]), f64([1.0, 0.0, 0.0, 1.0, 5.0])
    got = row(diagnostics.sequence_correction(prox, behav, weight, mask, sequence, 5, 2.0))
    assert got["is/seq_ratio_mean"] == pytest.approx((3 + 0.5 + 1) / 3)
    assert got["is/seq_weight_mean"] == pytest.approx((2 + 0.5 + 1) / 3)
    assert got["is/seq_reject_frac"] == pytest.approx(1 / 3)
    figures = diagnostics.with_ess(got)
    assert figures["is/ess_seq"] == pytest.approx(4.5**2 / (3 * (9 + 0.25 + 1)))
    assert figures["is/ess_seq_truncated"] == pytest.approx(3.5**2 / (3 * (4 + 0.25 + 1)))
    assert not any("_sq_" in name for name in figures)
    unweighted = row(diagnostics.sequence_correction(prox, behav, None, mask, sequence, 5, None))
    assert set(unweighted) == {"is/seq_ratio_mean", "is/seq_ratio_sq_mean"}
    huge = diagnostics.sequence_correction(prox + 15, behav, weight, mask, sequence, 5, 2.0)
    assert row(huge)["is/seq_ratio_mean"] <= math.exp(20)


def test_the_critic_is_judged_over_all_parts_not_by_a_mean_of_their_variances():
    returns, values = f64([0, 1, 2, 3, 99]), f64([0, 1, 2, 2, math.nan])
    mask, clipped = bools([1, 1, 1, 1, 0]), bools([0, 1, 0, 0, 1])
    parts = [diagnostics.value(values[at], returns[at], clipped[at], mask[at]) for at in (slice(0, 2), slice(2, 5))]
    got = diagnostics.with_explained_variance(row(*parts))
    assert got == {
        "value/returns_mean": pytest.approx(1.5),
        "value/returns_std": pytest.approx(math.sqrt(1.25)),
        "value/residual_mean": pytest.approx(0.25),
        "value/explained_var": pytest.approx(0.85),
        "value/vf_clipfrac": pytest.approx(0.25),
    }
    assert diagnostics.with_explained_variance({"loss": 1.0}) == {"loss": 1.0}
    flat = row(diagnostics.value(f64([1, 2]), f64([3, 3]), bools([0, 0]), bools([1, 1])))
    assert diagnostics.with_explained_variance(flat)["value/explained_var"] == 0


@settings(max_examples=50, deadline=None)
@given(ragged)
def test_the_distance_from_the_reference_is_per_token_and_per_trajectory(rows):
    _, _, logp, ref, mask = columns(rows, garbage=math.nan)
    sequence = sequence_of(rows)
    parts = [diagnostics.reference(logp[at], ref[at], mask[at], sequence[at]) for at in (sequence % 2 == 0, sequence % 2 == 1)]
    got = row(*parts)
    sums = [math.fsum(p - b for _, _, p, b, m in r if m) for r in rows if any(t[-1] for t in r)]
    k3s = [math.exp(b - p) - 1 + p - b for r in rows for _, _, p, b, m in r if m]
    assert got.get("kl_ref/seq_sum", 0.0) == pytest.approx(np.mean(sums) if sums else 0.0, abs=1e-9)
    assert got.get("kl_ref/k3", 0.0) == pytest.approx(min(10.0, np.mean(k3s)) if k3s else 0.0, rel=1, abs=1e-9)
    if k3s and max(k3s) < 10:
        assert got["kl_ref/k3"] == pytest.approx(np.mean(k3s), abs=1e-9)


def test_figures_have_no_gradient_and_no_figure_of_nothing_divides_by_zero():
    x, none, index = f64([]).requires_grad_(), bools([]), torch.zeros(0, dtype=torch.int64)
    empty = [
        diagnostics.outside(x, x, none, eps_low=0.2, eps_high=0.2),
        diagnostics.value(x, x.detach(), none, none),
        diagnostics.reference(x, x.detach(), none, index),
        diagnostics.sequence_correction(x, x.detach(), x.detach(), none, index, 0, 2.0),
    ]
    assert row(*empty) == {}
    assert not any(total.requires_grad for part in empty for total, _ in part.means.values())
