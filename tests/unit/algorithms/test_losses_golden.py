"""Every golden case of a policy loss: the value, the gradient per token, and where given the flags."""

from __future__ import annotations

import pytest
import torch

from async_rl.algorithms.corrections import CORRECTIONS
from async_rl.algorithms.losses import AGGREGATION_OF, LOSSES
from async_rl.algorithms.sequences import sequence_sum

from .estimator_cases import cases
from .loss_cases import aggregated, close, f64, flat, gradient, index_of, make_terms


def check_tokens(name, terms, expected, tol, **options):
    got = LOSSES[name](terms, **options)
    close(got.loss.detach(), expected["loss"], tol)
    close(gradient(terms, got.loss.sum()), expected["dloss_dlogp"], tol)
    return got


@cases("ppo_token_loss")
@pytest.mark.parametrize("name", ["ppo", "bypass_ppo", "decoupled_ppo"])
def test_the_clipped_loss_its_gradient_and_its_flags_are_the_golden_ones(inputs, expected, tol, name):
    anchor = {"behav" if name == "bypass_ppo" else "prox": inputs["logp_prox"]}
    terms = make_terms(inputs["logp"], adv=inputs["adv"], **anchor)
    got = check_tokens(name, terms, expected, tol, **{key: inputs[key] for key in ("eps_low", "eps_high", "dual_clip")})
    for flag in ("clipped_high", "clipped_low", "dual_clipped"):
        close(getattr(got, flag), expected[flag], 0)


@cases("ppo_token_loss_bypass")
def test_bypass_clips_tokens_that_only_look_moved(inputs, expected, tol):
    nonsense = [7.0] * 3  # a weight would count the ratio twice
    terms = make_terms(inputs["logp"], behav=inputs["logp_behav"], prox=[-9.0] * 3, adv=inputs["adv"], weight=nonsense)
    check_tokens("bypass_ppo", terms, expected, tol, eps_low=inputs["eps_low"], eps_high=inputs["eps_high"], dual_clip=None)


@cases("decoupled_ppo")
def test_decoupled_ppo_is_the_golden_one_with_the_count_before_rejection(inputs, expected, tol):
    terms = make_terms(
        inputs["logp"], prox=inputs["logp_prox"], behav=inputs["logp_behav"], adv=inputs["adv"], mask=inputs["mask"]
    )
    weight = CORRECTIONS[f"token_{inputs['is_mode']}"](*terms[1:3], *terms[5:], low=inputs["is_low"], high=inputs["is_high"])
    close(weight, expected["w"], tol)
    terms = terms._replace(weight_R=weight)
    bounds = {"eps_low": inputs["eps_low"], "eps_high": inputs["eps_high"], "dual_clip": None}
    check_tokens("decoupled_ppo", terms, expected, tol, **bounds)
    close(aggregated("decoupled_ppo", terms, "token_mean", **bounds).detach(), expected["token_mean"], tol)


@cases("cispo")
def test_cispo_is_the_golden_one_and_scales_with_the_weight(inputs, expected, tol):
    terms = make_terms(inputs["logp"], prox=inputs["logp_prox"], behav=[-9.0] * 3, adv=inputs["adv"])
    options = {"low": inputs["weight_low"], "high": inputs["weight_high"]}
    got = check_tokens("cispo", terms, expected, tol, **options)
    ratio = (terms.logp_R - terms.logp_prox_R).exp()
    assert got.clipped_high.tolist() == (ratio > options["high"]).tolist()
    assert got.clipped_low.tolist() == (ratio < options["low"]).tolist()
    half = LOSSES["cispo"](terms._replace(weight_R=terms.weight_R / 2), **options)
    close(half.loss.detach(), f64(expected["loss"]) / 2, tol)


@cases("aipo")
def test_aipo_is_the_golden_one(inputs, expected, tol):
    terms = make_terms(inputs["logp"], behav=inputs["logp_behav"], prox=[-9.0] * 3, adv=inputs["adv"], weight=[7.0] * 3)
    got = check_tokens("aipo", terms, expected, tol, delta=inputs["delta"])
    assert got.clipped_high.tolist() == [False, True, False]


@cases("topr")
def test_topr_is_the_golden_one(inputs, expected, tol):
    sequence = index_of(inputs["logp"])
    terms = make_terms(
        flat(inputs["logp"]), behav=flat(inputs["logp_behav"]), adv=f64(inputs["reward"])[sequence], sequence=sequence
    )
    got = LOSSES["topr"](terms)
    close(sequence_sum(got.loss.detach(), *terms[5:]), expected["seq_loss"], tol)
    close(gradient(terms, got.loss.sum()), flat(expected["dloss_dlogp"]), tol)
    mean = aggregated("topr", terms, AGGREGATION_OF["topr"])
    close(mean.detach(), f64(expected["seq_loss"]).mean(), tol)
    assert got.clipped_high.tolist() == [False, False, True, True, False, False]


@cases("gspo")
def test_gspo_is_the_golden_one_under_its_aggregation(inputs, expected, tol):
    sequence, mask = index_of(inputs["logp"]), torch.tensor(flat(inputs["mask"])).bool()
    adv = f64(inputs["adv_seq"])[sequence]
    terms = make_terms(flat(inputs["logp"]), prox=flat(inputs["logp_prox"]), adv=adv, mask=mask, sequence=sequence)
    options = {"eps_low": inputs["eps_low"], "eps_high": inputs["eps_high"]}
    mean = aggregated("gspo", terms, AGGREGATION_OF["gspo"], **options)
    close(mean.detach(), expected["loss"], tol)
    close(gradient(terms, mean), flat(expected["dloss_dlogp"]), tol)
    got = LOSSES["gspo"](terms, **options)
    close(got.loss.detach()[mask], f64(expected["seq_loss"])[sequence[mask]], tol)
    clipped = torch.tensor(expected["clipped"])[sequence].bool() & mask
    assert (got.clipped_high | got.clipped_low).tolist() == clipped.tolist()


@cases("kimi_k15")
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_kimi_k15_is_the_golden_one_however_many_tokens_share_the_log_probs(inputs, expected, tol, parts):
    check_kimi("kimi_k15", inputs, expected, tol, parts)


@cases("kimi_pmd")
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_kimi_pmd_is_the_golden_one_however_many_tokens_share_the_log_probs(inputs, expected, tol, parts):
    check_kimi("kimi_pmd", inputs, expected, tol, parts)


def check_kimi(name, inputs, expected, tol, parts):
    sequence = torch.arange(len(inputs["adv"])).repeat_interleave(parts)
    spread = lambda x: f64(x)[sequence] / parts  # noqa: E731
    adv, nonsense = f64(inputs["adv"])[sequence], [7.0] * len(sequence)
    terms = make_terms(
        spread(inputs["seq_logp"]), behav=spread(inputs["seq_logp_old"]), adv=adv, weight=nonsense, sequence=sequence
    )
    got = LOSSES[name](terms, tau=inputs["tau"])
    close(sequence_sum(got.loss.detach(), *terms[5:]), expected["loss"], tol)
    close(gradient(terms, got.loss.sum()), f64(expected["dloss_dlogp"])[sequence], tol)
    mean = aggregated(name, terms, AGGREGATION_OF[name], tau=inputs["tau"])
    close(mean.detach(), f64(expected["loss"]).mean(), tol)


@cases("dppo_tv")
def test_dppo_is_the_golden_one(inputs, expected, tol):
    terms = make_terms(inputs["logp"], behav=inputs["logp_behav"], prox=[-9.0] * 4, adv=inputs["adv"], mask=inputs["mask"])
    got = check_tokens("dppo_tv", terms, expected, tol, **{key: inputs[key] for key in ("tv_high", "tv_low", "kl_tau")})
    close(~(got.clipped_high | got.clipped_low), expected["keep"], 0)
    assert got.clipped_high.tolist() == [True, False, False, False]


@cases("sapo")
def test_sapo_is_the_golden_one(inputs, expected, tol):
    terms = make_terms(inputs["logp"], behav=inputs["logp_prox"], adv=inputs["adv"])
    check_tokens("sapo", terms, expected, tol, tau_pos=inputs["tau_pos"], tau_neg=inputs["tau_neg"])
