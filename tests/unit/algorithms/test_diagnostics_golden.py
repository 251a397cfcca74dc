"""Every golden case that the algorithms of this tree cover: values, and where given the gradient per token."""

from __future__ import annotations

import numpy as np
import torch

from async_rl.algorithms import diagnostics
from async_rl.algorithms.losses import LOSSES

from .estimator_cases import cases, close, f64
from .loss_cases import make_terms


@cases("mismatch_metrics")
def test_mismatch_figures_are_the_golden_ones(inputs, expected, tol):
    learner, behav, mask = f64(inputs["logp_learner"]), f64(inputs["logp_behav"]), torch.tensor(inputs["mask"]).bool()
    means = {name: float(total / count) for name, (total, count) in diagnostics.mismatch(learner, behav, mask).means.items()}
    names = {
        "k1": "kl_k1",
        "k3": "kl_k3",
        "abs": "mean_abs_logp_diff",
        "mult_prob_err": "token_mult_prob_error",
        "chi2": "chi2",
    }
    for ours, golden in names.items():
        close(means[f"mismatch/{ours}"], expected[golden], tol)
    stats = diagnostics.ratio(learner, behav, mask)
    close(float(stats.means["is/ratio_mean"][0]) / 3, expected["ratio_mean"], tol)
    close(float(stats.maxima["is/ratio_max"]), expected["ratio_max"], tol)


@cases("clip_fractions")
def test_clip_fractions_count_only_tokens_that_lose_their_gradient(inputs, expected, tol):
    logp = f64(inputs["ratios"]).log()
    terms = make_terms(logp, prox=torch.zeros_like(logp), adv=inputs["adv"])
    loss = LOSSES["decoupled_ppo"](terms, eps_low=inputs["eps_low"], eps_high=inputs["eps_high"], dual_clip=None)
    means = diagnostics.clipping(loss, terms.logp_R, terms.logp_prox_R, terms.mask_R).means
    for ours, golden in (("high", "high"), ("low", "low")):
        total, count = means[f"ppo/clipfrac_{ours}"]
        close(float(total / count), expected[golden], tol)


@cases("staleness_hist")
def test_the_lag_histogram_is_the_golden_one(inputs, expected, tol):
    lags = inputs["current_version"] - np.asarray(inputs["token_versions"])
    got = diagnostics.lag_histogram(lags, np.ones(len(lags), bool), inputs["overflow_bin"])
    assert got == expected["hist"]
