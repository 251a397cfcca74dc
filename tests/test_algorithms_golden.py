"""Every golden case that the algorithms of this tree cover: values, and where given the gradient per token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.algorithms import aggregation, diagnostics
from async_rl.algorithms.advantages import ADVANTAGES, grpo
from async_rl.algorithms.losses import LOSSES
from async_rl.algorithms.schedules import lr_at

from .unit.algorithms.loss_cases import make_terms

CASES = json.loads((Path(__file__).parent / "golden" / "algorithms.json").read_text())


def cases(fn: str, ours=lambda inputs: True):
    mine = [c for c in CASES if c["fn"] == fn and ours(c["inputs"])]
    assert mine, f"no golden case of {fn}"
    return pytest.mark.parametrize(
        ("inputs", "expected", "tol"), [pytest.param(c["inputs"], c["expected"], c["tol"], id=c["name"]) for c in mine]
    )


def f64(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def close(got, want, tol: float) -> None:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert (np.abs(got - want) <= tol * np.maximum(1, np.abs(want))).all(), f"{got} != {want}"


@cases("grpo_advantage")
def test_group_advantages_are_the_golden_ones(inputs, expected, tol):
    ids = {name: k for k, name in enumerate(dict.fromkeys(inputs["group"]))}
    groups = torch.tensor([ids[name] for name in inputs["group"]])
    rewards, valid = f64(inputs["rewards"]), torch.ones(len(groups), dtype=torch.bool)
    close(
        grpo(rewards, groups, valid, eps=inputs["eps"], ddof=inputs["ddof"], norm_std=inputs["norm_std"]), expected["adv"], tol
    )
    if not inputs["norm_std"]:
        close(ADVANTAGES["dr_grpo"](rewards, groups, valid), expected["adv"], tol)


@cases("loss_aggregation")
@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_micro_batches_on_ranks_add_up_to_the_global_loss(inputs, expected, tol, mode):
    ranks = [[_flat(microbatch) for microbatch in rank] for rank in inputs["ranks"]]
    total = sum(aggregation.denominator(mode, counts) for rank in ranks for _, _, _, counts in rank)
    backward_losses = []
    for rank in ranks:
        backward_losses.append([])
        for losses, mask, sequence, counts in rank:
            scale = aggregation.token_scales(mode, mask, sequence, counts)
            backward_losses[-1].append(float(aggregation.contribution(losses, scale, mask, len(ranks), total)))
    close(np.mean([sum(rank) for rank in backward_losses]), expected[mode], tol)  # FSDP averages over ranks
    if mode == "token_mean":
        assert total == expected["global_tokens"]
        for got, want in zip(backward_losses, expected["token_mean_backward_losses"], strict=True):
            close(got, want, tol)
    else:
        assert total == expected["global_seqs"]


def _flat(microbatch):
    losses = f64([x for values, _, _ in microbatch for x in values])
    mask = torch.tensor([m for _, flags, _ in microbatch for m in flags], dtype=torch.bool)
    sequence = torch.tensor([i for i, (values, _, _) in enumerate(microbatch) for _ in values], dtype=torch.int64)
    return losses, mask, sequence, aggregation.num_tokens_per_sequence(mask, sequence, len(microbatch))


@cases("lr_schedule")
def test_the_learning_rate_is_the_golden_one_at_every_listed_step(inputs, expected, tol):
    args = [inputs[key] for key in ("total_steps", "peak", "warmup_frac", "hold_frac", "min_ratio")]
    got = [lr_at(step, *args) for step in inputs["steps"]]
    np.testing.assert_allclose(got, expected["lr"], rtol=0, atol=tol)


@cases("ess_fraction")
def test_the_effective_sample_size_is_the_golden_one(inputs, expected, tol):
    w = np.asarray(inputs["w"])
    close(diagnostics.ess(float(w.mean()), float((w**2).mean())), expected["ess"], tol)


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
    stats = diagnostics.correction(learner, behav, torch.ones_like(learner), mask)
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


@cases("zero_variance_fraction")
def test_zero_variance_shares_are_the_golden_ones(inputs, expected, tol):
    by_group: dict[int, list[float]] = {}
    for reward, group in zip(inputs["rewards"], inputs["group"], strict=True):
        by_group.setdefault(group, []).append(reward)
    got = diagnostics.groups(list(by_group.values()))
    close(got["group/zero_var_frac"], expected["fraction_of_groups"], tol)
    close(got["group/all_correct_frac"], expected["all_correct_fraction"], tol)
    close(got["group/all_wrong_frac"], expected["all_wrong_fraction"], tol)
    assert got["group/num_counted"] == expected["n_groups_counted"]


@cases("length_stats")
def test_length_figures_are_the_golden_ones(inputs, expected, tol):
    got = diagnostics.lengths(inputs["lengths"], inputs["finish"], inputs["correct"])
    close(got["len/mean"], expected["mean"], tol)
    close(got["truncated_frac"], expected["truncated_fraction"], tol)
    close(got["len/mean_correct"], expected["mean_correct"], tol)
    close(got["len/mean_incorrect"], expected["mean_incorrect"], tol)
