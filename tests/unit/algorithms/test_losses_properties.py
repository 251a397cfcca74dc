"""What must hold for every loss, weight and mask: on-policy identity, indifference to what is masked, finite extremes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from async_rl.algorithms import corrections
from async_rl.algorithms.aggregation import AGGREGATIONS
from async_rl.algorithms.corrections import CORRECTIONS, LEVELS, batch_normalised, batch_sum
from async_rl.algorithms.losses import LOSSES, WEIGHTED
from async_rl.algorithms.masks import MASKS, sequence_bounds
from async_rl.algorithms.sequences import sequence_mean
from async_rl.algorithms.terms import Terms

from .loss_cases import CLIP, OPTIONS, aggregated, f64, gradient, make_terms, random_terms

MASK_OPTIONS: dict[str, dict[str, Any]] = {
    "veto": {"threshold": 0.05},
    "icepop": {"low": 0.5, "high": 2.0},
    "sequence_product": {"low": 0.1, "high": 10.0},
    "sequence_geomean": {"low": 0.5, "high": 2.0},
    "sequence_k3_mean": {"low": None, "high": 0.8},
    "opsm": {"delta": 0.1},
    "m2po": {"cut": f64(0.5)},
    "m2po_all": {"cut": f64(0.5)},
}
BOUNDS = {"low": 0.5, "high": 2.0}
CONSTANTS = ("logp_prox_R", "logp_behav_R", "advantages_R", "weight_R")


def replaced(terms: Terms, where: torch.Tensor, value: float) -> Terms:
    """Terms with every tensor of numbers set to `value` where told; `logp_R` is a leaf again."""
    new: dict[str, Any] = {name: torch.where(where, value, getattr(terms, name)) for name in CONSTANTS}
    return terms._replace(logp_R=torch.where(where, value, terms.logp_R.detach()).requires_grad_(), **new)


def weights(name: str, terms: Terms) -> torch.Tensor:
    return CORRECTIONS[name](*terms[1:3], *terms[5:], **BOUNDS)


def on_policy() -> Terms:
    """A trajectory of three tokens, one masked; one of a single token; one without any; two of advantage < 0 and 0."""
    sequence = torch.tensor([0, 0, 0, 1, 3, 3, 4, 4])
    mask = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1])
    logp, adv = [-0.1, -2, -7, -3, -0.5, -1, -2, -1e-3], f64([1.5, 0.7, 0, -0.5, 0])[sequence]
    return make_terms(logp, adv=adv, mask=mask, sequence=sequence, num_sequences=5)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_minus_the_advantage_and_nothing_is_clipped(name):
    terms = on_policy()
    got = LOSSES[name](terms, **OPTIONS[name])
    want = torch.where(terms.mask_R, -terms.advantages_R, 0)
    assert gradient(terms, got.loss.sum()).tolist() == pytest.approx(want.tolist(), rel=1e-12)
    assert not (got.clipped_high | got.clipped_low | got.dual_clipped).any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_on_policy_the_step_is_that_of_reinforce_under_every_aggregation(name, mode):
    terms = on_policy()
    per_token = {
        "token_mean": f64([7] * 5),
        "seq_mean_token_sum": f64([4] * 5),
        "seq_mean_token_mean": f64([8, 4, 1, 8, 8]),
        "seq_mean_token_sum_norm": f64([4 * 9] * 5),
        "prompt_mean": f64([8, 4, 1, 8, 8]),
    }
    want = torch.where(terms.mask_R, -terms.advantages_R / per_token[mode][terms.sequence_R], 0)
    got = gradient(terms, aggregated(name, terms, mode, **OPTIONS[name]))
    assert got.tolist() == pytest.approx(want.tolist(), rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6])
def test_garbage_at_masked_positions_changes_no_bit_of_a_loss_or_its_gradient(name, garbage):
    terms = random_terms(0)
    results = []
    for value in (garbage, 0.0):
        dirty = replaced(terms, ~terms.mask_R, value)
        got = LOSSES[name](dirty, **OPTIONS[name])
        results.append([got.loss.detach(), gradient(dirty, got.loss.sum()), *got[1:]])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
        assert not a[~terms.mask_R].any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e6])
def test_garbage_at_masked_positions_changes_no_weight_and_no_mask(garbage):
    terms = random_terms(1, num_tokens=24, num_sequences=10)
    dirty = replaced(terms, ~terms.mask_R, garbage)
    for name in CORRECTIONS:
        assert torch.equal(weights(name, terms), weights(name, dirty))
        assert not weights(name, dirty)[~terms.mask_R].any()
    for level in LEVELS:
        assert batch_sum(terms.weight_R, *terms[5:], level) == batch_sum(dirty.weight_R, *terms[5:], level)
    for name, mask in MASKS.items():
        keep = mask(terms, **MASK_OPTIONS[name])
        assert torch.equal(keep, mask(dirty, **MASK_OPTIONS[name]))
        assert not keep[~terms.mask_R].any()
        assert keep.any() and not keep[terms.mask_R].all(), f"{name} is not put to the test"


@pytest.mark.parametrize("name", LOSSES)
def test_a_tokens_loss_carries_the_gradient_of_its_own_log_prob_alone(name):
    terms = random_terms(2)
    loss = LOSSES[name](terms, **OPTIONS[name]).loss
    whole = gradient(terms, loss.sum())
    for k in range(len(loss)):
        (own,) = torch.autograd.grad(LOSSES[name](terms, **OPTIONS[name]).loss[k], terms.logp_R)
        assert own[k] == whole[k]
        assert own.count_nonzero() <= 1 and (own.count_nonzero() == 0 or own[k] != 0)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adv", [1.0, -1.0])
def test_a_log_ratio_of_200_either_way_stays_finite_and_no_less_than_fp32(name, dtype, adv):
    terms = make_terms([-200.0, -1e-3], prox=[-1e-3, -200.0], behav=[-1e-3, -200.0], adv=[adv, adv])
    for sequence in (torch.tensor([0, 0]), torch.tensor([0, 1])):
        terms = terms._replace(sequence_R=sequence, num_sequences=2)
        low = terms._replace(logp_R=terms.logp_R.detach().to(dtype).requires_grad_())
        low = low._replace(**{name: getattr(terms, name).to(dtype) for name in CONSTANTS})
        got = LOSSES[name](low, **(OPTIONS[name] | ({"dual_clip": None} if "dual_clip" in OPTIONS[name] else {})))
        assert got.loss.dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert got.loss.isfinite().all()
        assert gradient(low, got.loss.sum()).isfinite().all()
        for correction in CORRECTIONS:
            assert weights(correction, low).isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_without_tokens_or_without_trajectories_is_an_empty_loss_with_a_gradient(name):
    for terms in (make_terms([]), make_terms([], num_sequences=3), make_terms([-1.0], mask=[False])):
        loss = LOSSES[name](terms, **OPTIONS[name]).loss
        assert loss.detach().tolist() == [0.0] * len(terms.logp_R)
        assert gradient(terms, loss.sum()).tolist() == [0.0] * len(terms.logp_R)
        for correction in CORRECTIONS:
            assert weights(correction, terms).tolist() == [0.0] * len(terms.logp_R)
        for mask in MASKS:
            assert not MASKS[mask](terms, **MASK_OPTIONS[mask]).any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_trajectory_gets_the_loss_it_would_get_alone(name):
    terms = random_terms(3)
    together = LOSSES[name](terms, **OPTIONS[name]).loss
    for i in range(terms.num_sequences):
        at = terms.sequence_R == i
        mine: dict[str, Any] = {name: getattr(terms, name)[at] for name in ("logp_R", *CONSTANTS, "mask_R")}
        alone = terms._replace(**mine, sequence_R=torch.zeros_like(terms.sequence_R[at]), num_sequences=1)
        assert torch.allclose(LOSSES[name](alone, **OPTIONS[name]).loss, together[at], rtol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_nan_at_a_trainable_token_reaches_the_loss_so_the_finite_guard_sees_it(name):
    terms = make_terms([-1.0, math.nan], prox=[-1.0, -1.0], behav=[-1.0, -1.0], adv=[1.0, 1.0])
    terms = terms._replace(sequence_R=torch.tensor([0, 1]), num_sequences=2)
    assert LOSSES[name](terms, **OPTIONS[name]).loss.isfinite().tolist() == [True, False]
    for mask in MASKS:
        assert MASKS[mask](terms._replace(logp_prox_R=terms.logp_R.detach()), **MASK_OPTIONS[mask])[1], mask


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_losses_said_to_be_weighted_scale_with_the_weight(name):
    terms = random_terms(4)
    once = LOSSES[name](terms, **OPTIONS[name]).loss
    twice = LOSSES[name](terms._replace(weight_R=2 * terms.weight_R), **OPTIONS[name]).loss
    assert torch.equal(twice, 2 * once if name in WEIGHTED else once)


@pytest.mark.parametrize("name", LOSSES)
def test_shapes_that_would_broadcast_and_constants_with_a_gradient_are_refused(name):
    terms = make_terms([-1.0] * 4)
    with pytest.raises(ValueError, match=r"weight has shape \(4, 4\), but logp has shape \(4,\)"):
        LOSSES[name](terms._replace(weight_R=torch.zeros(4, 4)), **OPTIONS[name])
    with pytest.raises(ValueError, match=r"sequence has shape \(1,\)"):
        LOSSES[name](terms._replace(sequence_R=torch.zeros(1, dtype=torch.int64)), **OPTIONS[name])
    for constant in CONSTANTS:
        with pytest.raises(ValueError, match=f"{constant.removesuffix('_R')} carries gradient"):
            LOSSES[name](terms._replace(**{constant: torch.zeros(4, requires_grad=True)}), **OPTIONS[name])
    with pytest.raises(ValueError, match="mask has dtype"):
        LOSSES[name](terms._replace(mask_R=torch.ones(4)), **OPTIONS[name])
    with pytest.raises(ValueError, match="sequence has dtype"):
        LOSSES[name](terms._replace(sequence_R=torch.zeros(4, dtype=torch.int32)), **OPTIONS[name])


def test_options_have_no_defaults_so_that_none_is_forgotten():
    for name, loss in LOSSES.items():
        if OPTIONS[name]:
            with pytest.raises(TypeError, match="missing"):
                loss(make_terms([-1.0]))


def test_dual_clip_bounds_negative_advantages_only():
    terms = make_terms([math.log(50)] * 2, prox=[0.0, 0.0], behav=[0.0, 0.0], adv=[-1.0, 1.0])
    for name in ("ppo", "bypass_ppo", "decoupled_ppo"):
        assert LOSSES[name](terms, **CLIP).loss.tolist() == pytest.approx([3.0, -1.28])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_on_policy_are_one_and_never_carry_gradient(name):
    terms = on_policy()
    got = weights(name, terms._replace(logp_prox_R=terms.logp_R, logp_behav_R=terms.logp_R))
    assert not got.requires_grad
    assert got.tolist() == terms.mask_R.double().tolist()


def test_weights_refuse_what_they_cannot_do():
    terms = make_terms([-1.0] * 4)
    arguments = (*terms[1:3], *terms[5:])
    with pytest.raises(ValueError, match=r"logp_behav has shape \(1,\), but logp_prox has shape \(4,\)"):
        CORRECTIONS["token_truncate"](terms[1], terms[2][:1], *terms[5:], low=None, high=2.0)
    with pytest.raises(ValueError, match="'truncate' needs high"):
        CORRECTIONS["token_truncate"](*arguments, low=0.1, high=None)
    for name in ("sequence_mask", "geometric_clip"):
        with pytest.raises(ValueError, match="needs low"):
            CORRECTIONS[name](*arguments, low=None, high=2.0)
    with pytest.raises(ValueError, match="unknown level 'word'"):
        corrections.weights(*arguments, level="word", mode="none", low=None, high=None)
    with pytest.raises(ValueError, match="unknown mode 'cap'"):
        corrections.weights(*arguments, level="token", mode="cap", low=None, high=None)
    with pytest.raises(ValueError, match="unknown level 'word'"):
        batch_sum(terms.weight_R, *terms[5:], "word")
    with pytest.raises(ValueError, match="unknown statistic 'median'"):
        sequence_bounds(terms, statistic="median", low=None, high=None)


@pytest.mark.parametrize("level", LEVELS)
def test_batch_normalised_weights_have_a_mean_of_one_over_all_ranks(level):
    ranks = [random_terms(seed, num_sequences=30) for seed in (5, 6)]  # some without a token
    raw = [weights(f"{level}_truncate", terms) for terms in ranks]
    pieces = [batch_sum(w, *terms[5:], level) for w, terms in zip(raw, ranks, strict=True)]
    total, count = (torch.stack(x).sum() for x in zip(*pieces, strict=True))
    after = [batch_normalised(w, total, count) for w in raw]
    if level == "token":
        mine = torch.cat([w[terms.mask_R] for w, terms in zip(after, ranks, strict=True)])
    else:
        trained = [torch.unique(terms.sequence_R[terms.mask_R]) for terms in ranks]
        mine = torch.cat([sequence_mean(w, *terms[5:])[at] for w, terms, at in zip(after, ranks, trained, strict=True)])
    assert len(mine) == int(count)
    assert float(mine.mean()) == pytest.approx(1.0)
    assert torch.allclose(after[0] * (total / count), raw[0])


def test_weights_that_are_all_rejected_stay_zero_when_normalised():
    zeros = f64([0.0, 0.0])
    total, count = batch_sum(zeros, torch.ones(2, dtype=torch.bool), torch.tensor([0, 0]), 1, "token")
    assert batch_normalised(zeros, total, count).tolist() == [0.0, 0.0]
    assert batch_normalised(zeros[:0], f64(0.0), f64(0.0)).tolist() == []


def test_the_mean_importance_ratio_over_the_behavior_policy_is_one():
    behav, prox = f64([0.1, 0.4, 0.5]), f64([0.3, 0.3, 0.4])
    terms = make_terms(prox.log(), behav=behav.log())
    assert float((behav * CORRECTIONS["token_none"](*terms[1:3], *terms[5:], low=None, high=None)).sum()) == pytest.approx(1.0)


def test_a_product_falls_into_the_length_trap_that_its_root_does_not():
    terms = make_terms([math.log(1.1)] * 100, behav=[0.0] * 100)
    assert float(CORRECTIONS["sequence_none"](*terms[1:3], *terms[5:], low=None, high=None)[0]) == pytest.approx(
        13780, rel=1e-3
    )
    assert not MASKS["sequence_product"](terms, low=0.6, high=1.4).any()
    assert MASKS["sequence_geomean"](terms, low=0.8, high=1.25).all()
