"""What must hold for any input: on-policy identity, indifference to garbage under the mask, to splits and to order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from async_rl.algorithms import aggregation, diagnostics, filters
from async_rl.algorithms.advantages import grpo
from async_rl.algorithms.corrections import CORRECTIONS
from async_rl.algorithms.losses import LOSSES, decoupled_ppo
from async_rl.types import FinishReason, Trajectory

BOUNDS = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}


def f64(*x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def everything(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def step(logp, prox, behav, adv, mask, sequence, num_sequences, mode="token_mean", name="decoupled_ppo"):
    """(loss, gradient) of one optimizer step that is one micro-batch."""
    logp = logp.clone().requires_grad_()
    weight = CORRECTIONS["token_truncate"](prox, behav, mask, 2.0)
    counts = aggregation.num_tokens_per_sequence(mask, sequence, num_sequences)
    alone = torch.arange(num_sequences)  # each answer its own prompt
    scale = aggregation.token_scales(mode, mask, sequence, counts, group_ids_N=alone, max_tokens=9)
    loss = LOSSES[name](logp, prox, weight, adv, mask, **BOUNDS).loss
    n = aggregation.denominator(mode, counts, group_ids_N=alone)
    total = aggregation.contribution(loss, scale, mask, 1, n)
    total.backward()
    return total.detach(), logp.grad


def random_step(generator, num_tokens=40, num_sequences=7):
    draw = lambda: torch.randn(num_tokens, generator=generator, dtype=torch.float64)  # noqa: E731
    logp, prox, behav = (-draw().abs() for _ in range(3))
    sequence = torch.randint(num_sequences, (num_tokens,), generator=generator).sort().values
    mask = torch.rand(num_tokens, generator=generator) < 0.6
    return [logp, prox, behav, draw(), mask, sequence, num_sequences]


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_minus_the_advantage_whatever_the_loss(name):
    logp = f64(-0.1, -2, -7).requires_grad_()
    prox, adv, mask = logp.detach(), f64(1.5, -0.5, 0), everything(3)
    for correction in CORRECTIONS.values():
        logp.grad = None
        got = LOSSES[name](logp, prox, correction(prox, prox, mask, 2.0), adv, mask, **BOUNDS)
        got.loss.sum().backward()
        assert logp.grad is not None
        assert logp.grad.tolist() == (-adv).tolist()
        assert not (got.clipped_high | got.clipped_low | got.dual_clipped).any()
    stats = diagnostics.mismatch(prox, prox, mask)
    assert all(float(total) == 0 for name, (total, _) in stats.means.items() if "mult_prob" not in name)


@pytest.mark.parametrize("mode", aggregation.AGGREGATIONS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6])
def test_garbage_at_masked_positions_changes_no_bit_of_loss_gradient_or_diagnostics(mode, garbage):
    args = random_step(torch.Generator().manual_seed(0))
    mask = args[4]
    dirty = [torch.where(mask, x, torch.full_like(x, garbage)) for x in args[:4]] + args[4:]
    clean = [torch.where(mask, x, torch.zeros_like(x)) for x in args[:4]] + args[4:]
    for a, b in zip(step(*dirty, mode=mode), step(*clean, mode=mode), strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)
    figures = []
    for x in (dirty, clean):
        weight = CORRECTIONS["token_truncate"](x[1], x[2], mask, 2.0)
        loss = decoupled_ppo(x[0], x[1], weight, x[3], mask, **BOUNDS)
        for stats in (
            diagnostics.mismatch(x[0], x[2], mask),
            diagnostics.correction(x[1], x[2], weight, mask),
            diagnostics.clipping(loss, x[0], x[1], mask),
        ):
            figures.append({k: float(v[0]) for k, v in stats.means.items()} | {k: float(v) for k, v in stats.maxima.items()})
    assert figures[:3] == figures[3:]


def test_nan_at_a_trainable_token_reaches_the_loss_so_the_finite_guard_sees_it():
    mask = everything(2)
    loss = decoupled_ppo(f64(-1, math.nan), f64(-1, -1), f64(1, 1), f64(1, 1), mask, **BOUNDS).loss
    assert loss.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("mode", aggregation.AGGREGATIONS)
def test_duplicating_every_sample_leaves_the_loss_as_it_was(mode):
    args = random_step(torch.Generator().manual_seed(1))
    once, slopes = step(*args, mode=mode)
    twice = [torch.cat([x, x]) for x in args[:5]] + [torch.cat([args[5], args[5] + args[6]]), 2 * args[6]]
    loss, both = step(*twice, mode=mode)
    assert torch.allclose(loss, once)
    assert torch.allclose(both[: len(slopes)] * 2, slopes)


def test_two_tokens_of_loss_one_and_eight_of_loss_zero_make_a_fifth():
    mask, sequence = everything(10), torch.tensor([0, 0] + [1] * 8)
    counts = aggregation.num_tokens_per_sequence(mask, sequence, 2)
    scale = aggregation.token_scales("token_mean", mask, sequence, counts)
    losses = f64(*[1.0] * 2 + [0.0] * 8)
    parts = [aggregation.contribution(losses[at], scale[at], mask[at], 1, 10) for at in (sequence == 0, sequence == 1)]
    assert float(sum(parts)) == pytest.approx(0.2)


def test_a_masked_truncated_answer_leaves_the_loss_of_the_other_alone():
    logp, adv = f64(*[-1.0] * 16), f64(*[1.0] * 4 + [-3.0] * 12)
    mask = torch.arange(16) < 4
    sequence = (torch.arange(16) >= 4).long()
    both, _ = step(logp, logp, logp, adv, mask, sequence, 2)
    alone, _ = step(logp[:4], logp[:4], logp[:4], adv[:4], mask[:4], sequence[:4], 1)
    assert torch.equal(both, alone)


@pytest.mark.parametrize(("mode", "short", "long"), [("seq_mean_token_mean", 0.05, 0.005), ("token_mean", 1 / 110, 1 / 110)])
def test_each_aggregation_weighs_a_token_of_a_short_and_of_a_long_answer_as_documented(mode, short, long):
    sequence = torch.tensor([0] * 10 + [1] * 100)
    logp = torch.full((110,), -1.0, dtype=torch.float64)
    _, slopes = step(logp, logp, logp, -torch.ones_like(logp), everything(110), sequence, 2, mode=mode)
    assert float(slopes[0]) == pytest.approx(short)
    assert float(slopes[-1]) == pytest.approx(long)


def test_a_zero_denominator_is_refused_not_divided_by():
    with pytest.raises(ValueError, match="denominator is 0"):
        aggregation.contribution(f64(1.0), f64(1.0), everything(1), 1, 0)


def test_a_loss_that_is_nan_under_the_mask_adds_nothing():
    part = aggregation.contribution(f64(2.0, math.nan), f64(1.0, math.inf), torch.tensor([True, False]), 2, 4)
    assert float(part) == 1.0


def test_an_empty_micro_batch_contributes_zero_and_still_has_a_gradient():
    none, mask = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.bool)
    logp = none.clone().requires_grad_()
    weight = CORRECTIONS["token_truncate"](none, none, mask, 2.0)
    part = aggregation.contribution(decoupled_ppo(logp, none, weight, none, mask, **BOUNDS).loss, none, mask, 2, 5)
    part.backward()
    assert float(part.detach()) == 0
    assert logp.grad is not None
    assert diagnostics.mismatch(none, none, mask).means["mismatch/k3"][1] == 0


def test_shapes_that_would_broadcast_are_refused_with_both_shapes():
    four, table = torch.zeros(4), torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"weight has shape \(4, 4\), but logp has shape \(4,\)"):
        decoupled_ppo(four, four, table, four, everything(4), **BOUNDS)
    with pytest.raises(ValueError, match=r"logp_behav has shape \(1,\), but logp_prox has shape \(4,\)"):
        CORRECTIONS["token_truncate"](four, four[:1], everything(4), 2.0)
    with pytest.raises(ValueError, match="flat"):
        aggregation.contribution(table, table, everything(4, 4), 1, 16)
    with pytest.raises(ValueError, match="group_ids has shape"):
        grpo(four, torch.zeros(3, dtype=torch.int64), everything(4))


def test_weights_never_carry_gradient_and_the_loss_refuses_those_that_do():
    x = torch.zeros(2, requires_grad=True)
    for correction in CORRECTIONS.values():
        assert not correction(x, x, everything(2), 2.0).requires_grad
    with pytest.raises(ValueError, match="weight carries gradient"):
        decoupled_ppo(x, x.detach(), x, x.detach(), everything(2), **BOUNDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduced_precision_inputs_are_computed_in_fp32_and_huge_ratios_stay_finite(dtype):
    logp = torch.tensor([-1000.0, 0.0], dtype=dtype, requires_grad=True)
    prox, mask = torch.tensor([0.0, -1000.0], dtype=dtype), everything(2)
    weight = CORRECTIONS["token_truncate"](prox, prox, mask, 2.0)
    loss = decoupled_ppo(
        logp, prox, weight, torch.tensor([1.0, -1.0], dtype=dtype), mask, eps_low=0.2, eps_high=0.2, dual_clip=None
    ).loss
    assert loss.dtype == torch.float32
    assert loss.isfinite().all()


def test_dual_clip_bounds_negative_advantages_only():
    logp, mask = f64(math.log(50), math.log(50)), everything(2)
    bounds = {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": 3.0}
    loss = decoupled_ppo(logp, f64(0, 0), f64(1, 1), f64(-1, 1), mask, **bounds).loss
    assert loss.tolist() == pytest.approx([3.0, -1.2])


def test_large_equal_rewards_do_not_differ_by_the_rounding_of_their_mean():
    assert not grpo(f64(*[1e12 + 0.1] * 7), torch.zeros(7, dtype=torch.int64), everything(7)).any()


def trajectory(num_tokens=3, reward=1.0, finish: FinishReason = "stop", error="", mask=None, logprobs=None) -> Trajectory:
    ids = np.zeros(num_tokens, np.int32)
    return Trajectory(
        token_ids=ids,
        logprobs=np.full(num_tokens, -1, np.float32) if logprobs is None else logprobs,
        incarnations=ids,
        versions=ids,
        mask=np.ones(num_tokens, bool) if mask is None else mask,
        finish_reason=finish,
        reward=reward,
        error=error,
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"finish": "length"}, ""),
        ({"num_tokens": 1}, ""),
        ({"num_tokens": 0}, "empty"),
        ({"finish": "abort"}, "aborted"),
        ({"finish": "error"}, "error"),
        ({"reward": math.nan}, "unscorable"),
        ({"reward": math.inf}, "unscorable"),
        ({"error": "the scorer raised"}, "unscorable"),
        ({"mask": np.zeros(3, bool)}, "untrained"),
        ({"logprobs": np.array([-1, np.nan, -1], np.float32)}, "bad_logprob"),
        ({"logprobs": np.array([-1, np.nan, -1], np.float32), "mask": np.array([True, False, True])}, ""),
    ],
)
def test_a_trajectory_is_left_out_for_a_reason_it_carries(changes, reason):
    assert filters.valid(trajectory(**changes)) == reason


def test_lengths_are_sampled_tokens_and_do_not_change_when_an_answer_is_masked_for_the_loss():
    mask = np.array([0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1], bool)
    assert diagnostics.lengths([int(mask.sum())], ["stop"], [1.0])["len/max"] == 9
    assert diagnostics.lengths([4, 12], ["stop", "length"], [1.0, 0.0])["len/max"] == 12


def test_lag_counts_trainable_tokens_and_a_token_from_the_future_is_an_error():
    assert diagnostics.lag_histogram(np.array([0, 9, 1]), np.array([True, False, True]), 2) == [1, 1, 0]
    with pytest.raises(ValueError, match="lag -1"):
        diagnostics.lag_histogram(np.array([-1]), np.array([True]), 2)


def test_mismatch_and_correction_figures_are_those_of_paper_and_pencil():
    prox, behav, mask = f64(0.5, 1.5, 3).log(), f64(0, 0, 0), everything(3)
    means = diagnostics.mismatch(prox, behav, mask, "_lag0").means
    assert float(means["mismatch/k3_lag0"][0]) == pytest.approx(0.5 + 1.5 + 3 - 3 - math.log(2.25))
    assert float(means["mismatch/k1_lag0"][0]) == pytest.approx(-math.log(2.25))
    cut = diagnostics.correction(prox, behav, CORRECTIONS["token_truncate"](prox, behav, mask, 2.0), mask).means
    assert [float(x) for x in cut["is/trunc_frac_high"]] == [1, 3]
    assert float(cut["is/weight_mean"][0]) == pytest.approx(4.0)


def test_figures_of_nothing_are_zero_not_nan():
    assert diagnostics.ess(0.0, 0.0) == 0
    assert set(diagnostics.lengths([], [], []).values()) == {0.0}
    assert diagnostics.groups([[1.0]])["group/num_singleton"] == 1
    assert diagnostics.lag_histogram(np.zeros(0, int), np.zeros(0, bool), 2) == [0, 0, 0]


def test_ess_comes_from_merged_moments_not_from_a_mean_of_ess():
    w = np.array([1.0, 2, 3])
    row = {"is/ratio_mean": w.mean(), "is/ratio_sq_mean": (w**2).mean(), "loss": 1.0}
    got = diagnostics.with_ess(row)
    assert got["is/ess_token"] == pytest.approx(36 / 42)
    assert "is/ratio_sq_mean" not in got
    assert "is/ess_token_truncated" not in got


def test_the_mean_importance_ratio_over_the_behavior_policy_is_one():
    behav, prox = f64(0.1, 0.4, 0.5), f64(0.3, 0.3, 0.4)
    untruncated = CORRECTIONS["token_truncate"](prox.log(), behav.log(), everything(3), 100.0)
    assert float((behav * untruncated).sum()) == pytest.approx(1.0)
