"""What must hold for any input: on-policy identity, indifference to garbage under the mask, to splits and to order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from async_rl.algorithms import aggregation, diagnostics, filters
from async_rl.algorithms.advantages import grpo
from async_rl.algorithms.corrections import CORRECTIONS, cut
from async_rl.algorithms.losses import LOSSES
from async_rl.types import FinishReason, Trajectory

from .loss_cases import make_terms

BOUNDS = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}


def f64(*x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def everything(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def truncated(prox, behav, mask, cap=2.0):
    sequence = torch.zeros(len(mask), dtype=torch.int64)
    return CORRECTIONS["token_truncate"](prox, behav, mask, sequence, 1, low=None, high=cap)


def cuts(prox, behav, mask, cap=2.0):
    sequence = torch.zeros(len(mask), dtype=torch.int64)
    return cut(prox, behav, mask, sequence, 1, level="token", mode="truncate", low=None, high=cap)


def step(logp, prox, behav, adv, mask, sequence, num_sequences, mode="token_mean"):
    """(loss, gradient) of one optimizer step that is one micro-batch."""
    terms = make_terms(
        logp,
        prox=prox,
        behav=behav,
        adv=adv,
        weight=truncated(prox, behav, mask),
        mask=mask,
        sequence=sequence,
        num_sequences=num_sequences,
    )
    counts = aggregation.num_tokens_per_sequence(mask, sequence, num_sequences)
    alone = torch.arange(num_sequences)  # every trajectory is of a prompt of its own
    scale = aggregation.token_scales(mode, mask, sequence, counts, group_ids_N=alone, max_tokens=9)
    loss = LOSSES["decoupled_ppo"](terms, **BOUNDS).loss
    total = aggregation.contribution(loss, scale, mask, 1, aggregation.denominator(mode, counts, group_ids_N=alone))
    total.backward()
    assert terms.logp_R.grad is not None
    return total.detach(), terms.logp_R.grad


def random_step(generator, num_tokens=40, num_sequences=7):
    draw = lambda: torch.randn(num_tokens, generator=generator, dtype=torch.float64)  # noqa: E731
    logp, prox, behav = (-draw().abs() for _ in range(3))
    sequence = torch.randint(num_sequences, (num_tokens,), generator=generator).sort().values
    mask = torch.rand(num_tokens, generator=generator) < 0.6
    return [logp, prox, behav, draw(), mask, sequence, num_sequences]


def test_on_policy_there_is_no_mismatch():
    logp = f64(-0.1, -2, -7)
    stats = diagnostics.mismatch(logp, logp, everything(3))
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
        weight = truncated(x[1], x[2], mask)
        terms = make_terms(x[0], prox=x[1], behav=x[2], weight=weight, adv=x[3], mask=mask)
        loss = LOSSES["decoupled_ppo"](terms, **BOUNDS)
        for stats in (
            diagnostics.mismatch(x[0], x[2], mask),
            diagnostics.ratio(x[1], x[2], mask),
            diagnostics.correction(weight, *cuts(x[1], x[2], mask), mask),
            diagnostics.clipping(loss, x[0], x[1], mask),
        ):
            figures.append({k: float(v[0]) for k, v in stats.means.items()} | {k: float(v) for k, v in stats.maxima.items()})
    assert figures[:4] == figures[4:]


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
    terms = make_terms(none)
    part = aggregation.contribution(LOSSES["decoupled_ppo"](terms, **BOUNDS).loss, none, mask, 2, 5)
    part.backward()
    assert float(part.detach()) == 0
    assert terms.logp_R.grad is not None
    assert diagnostics.mismatch(none, none, mask).means["mismatch/k3"][1] == 0


def test_shapes_that_would_broadcast_are_refused_with_both_shapes():
    four, table = torch.zeros(4), torch.zeros(4, 4)
    with pytest.raises(ValueError, match="flat"):
        aggregation.contribution(table, table, everything(4, 4), 1, 16)
    with pytest.raises(ValueError, match="group_ids has shape"):
        grpo(four, torch.zeros(3, dtype=torch.int64), everything(4))


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
    means = diagnostics.correction(truncated(prox, behav, mask), *cuts(prox, behav, mask), mask).means
    assert [float(x) for x in means["is/trunc_frac_high"]] == [1, 3]
    assert float(means["is/weight_mean"][0]) == pytest.approx(4.0)


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
