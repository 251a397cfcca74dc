"""One learner step on one rank: its gradient is the formula's, whatever the packing; and what it must refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from async_rl.algorithms.schedules import lr_at
from async_rl.learner.update.minibatches import batch_tensors, deal
from async_rl.learner.update.steering import Steering
from async_rl.types import Batch

from .learner_cases import (
    CPU,
    distance,
    gradients_of,
    make_batch,
    make_config,
    make_policy,
    make_update,
    naive_logprobs,
    on_policy,
    weights,
)
from .step_cases import METHODS, ODD, all_finite, method_update, near_batch, step_of

torch.set_num_threads(1)


def naive_gradients(config, policy, batch, scale_of):
    """-sum(A logp scale) differentiated over all trajectories at once: the on-policy gradient."""
    mask = torch.from_numpy(batch.mask)
    loss = -(
        naive_logprobs(policy, batch, config.rollout.temperature)
        * torch.from_numpy(np.repeat(batch.advantages, batch.response_lengths)).float()
        * scale_of
    )[mask]
    names = [n.removeprefix("hf.") for n, _ in policy.named_parameters()]
    grads = torch.autograd.grad(loss.sum(), list(policy.parameters()))
    return dict(zip(names, grads, strict=True))


def scale(mode: str, batch: Batch) -> torch.Tensor:
    """Weight of each token in the loss, N included, by a loop."""
    starts = np.cumsum(batch.response_lengths) - batch.response_lengths
    counts = [int(batch.mask[s : s + r].sum()) for s, r in zip(starts, batch.response_lengths, strict=True)]
    of_sequence = [1.0 / c if mode == "seq_mean_token_mean" and c else 1.0 for c in counts]
    n = sum(counts) if mode == "token_mean" else sum(c > 0 for c in counts)
    return torch.from_numpy(np.repeat(of_sequence, batch.response_lengths) / n).float()


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_on_policy_the_gradient_is_minus_advantage_times_that_of_the_logprob(mode):
    config, policy = make_config({"aggregation": mode}), make_policy()
    batch = on_policy(policy, make_batch(), config.rollout.temperature)
    expected = naive_gradients(config, policy, batch, scale(mode, batch))
    got, report = gradients_of(config, policy, batch)
    assert distance(got, expected) < 1e-5
    assert report.metrics["ppo/clipfrac_high"] == report.metrics["ppo/clipfrac_low"] == 0
    assert report.metrics["is/ess_token"] == pytest.approx(1, abs=1e-5)
    assert report.metrics["is/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert report.metrics["mismatch/k3_lag0"] < 1e-6
    assert report.metrics["mismatch/abs_lag0"] < 1e-4
    assert report.num_tokens == batch.mask.sum()


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_the_micro_batch_budget_changes_neither_gradient_nor_figures(mode):
    batch = make_batch(seed=3)
    calls: list[int] = []
    results = []
    for budget in (24, 60, 10_000):
        calls.append(0)

        def boundary() -> None:
            calls[-1] += 1

        config = make_config({"aggregation": mode}, {"microbatch_tokens": budget})
        results.append(gradients_of(config, make_policy(), batch, boundary=boundary))
    assert calls[0] > calls[1] > calls[2] == 1
    for got, report in results[:-1]:
        assert distance(got, results[-1][0]) < 1e-5
        assert report.metrics == pytest.approx(results[-1][1].metrics, rel=1e-4, abs=1e-6)


def test_what_stands_at_masked_tokens_does_not_matter_not_even_nan():
    batch = make_batch(seed=4, masked_share=0.3)
    expected, _ = gradients_of(make_config(), make_policy(), batch)
    for garbage in (1e6, np.nan, -np.inf):
        spoiled = dataclasses.replace(
            batch,
            logp_behav=np.where(batch.mask, batch.logp_behav, np.float32(garbage)),
        )
        got, _ = gradients_of(make_config(), make_policy(), spoiled)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_every_sample_twice_gives_the_same_gradient():
    batch = make_batch(seed=5)
    twice = Batch(**{f.name: np.concatenate([getattr(batch, f.name)] * 2) for f in dataclasses.fields(batch)})
    expected, _ = gradients_of(make_config(), make_policy(), batch)
    got, report = gradients_of(make_config(), make_policy(), twice)
    assert distance(got, expected) < 1e-5
    assert report.num_tokens == 2 * batch.mask.sum()


def test_the_importance_weight_is_truncated_and_multiplies_the_loss():
    policy, config = make_policy(), make_config()
    batch = on_policy(policy, make_batch(seed=6, masked_share=0), config.rollout.temperature)
    stale = dataclasses.replace(batch, logp_behav=batch.logp_behav - np.float32(np.log(1.5)))
    far = dataclasses.replace(batch, logp_behav=batch.logp_behav - 5)
    plain, _ = gradients_of(config, make_policy(), batch)
    for changed, weight in ((stale, 1.5), (far, config.algorithm.correction_options["high"])):
        got, _ = gradients_of(config, make_policy(), changed)
        assert distance(got, {name: g * weight for name, g in plain.items()}) < 1e-4


OF_WEIGHTS = {f"is/{name}" for name in ("weight_mean", "trunc_frac_high", "trunc_frac_low", "ess_token_truncated")}


@pytest.mark.parametrize(
    ("algorithm", "high", "low"),
    [
        ({"correction": "token_truncate", "correction_options": {"high": 1.2}}, True, False),
        ({"correction": "token_mask", "correction_options": {"low": 0.8, "high": 1.2}}, True, True),
        ({"correction": "token_truncate", "correction_options": {"high": 1e9}, "correction_normalize": True}, False, False),
        ({"correction": "sequence_truncate", "correction_options": {"high": 1e9}}, False, False),
        ({"correction": "geometric_none"}, False, False),
        ({"correction": "token_none", "loss": "cispo"}, False, False),
        ({"correction": "none"}, None, None),
        ({"loss": "aipo", "correction": "none"}, None, None),
        ({"loss": "topr", "correction": "none", "advantage": "dr_grpo"}, None, None),
    ],
)
def test_only_weights_that_are_cut_count_as_cut_and_a_loss_without_weights_says_nothing_of_them(algorithm, high, low):
    config = make_config(algorithm, i_know=True)
    metrics = gradients_of(config, make_policy(), near_batch())[1].metrics
    assert {"is/ratio_mean", "is/ess_token", "is/ess_seq"} <= set(metrics)
    if high is None:
        assert not (OF_WEIGHTS | {"is/ess_seq_truncated", "is/seq_weight_mean", "is/seq_reject_frac"}) & set(metrics)
    else:
        assert set(metrics) >= OF_WEIGHTS
        assert (metrics["is/trunc_frac_high"] > 0, metrics["is/trunc_frac_low"] > 0) == (high, low)


def test_a_batch_without_trainable_token_is_skipped_and_changes_nothing():
    batch = dataclasses.replace(make_batch(), mask=np.zeros_like(make_batch().mask))
    policy = make_policy()
    before = weights(policy)
    caught, report = gradients_of(make_config(), policy, batch)
    assert report.skipped and report.reason == "no trainable token" and report.metrics == {} and report.num_tokens == 0
    assert not caught
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())


@pytest.mark.parametrize("poison", ["loss", "policy/grad_norm"])
def test_a_step_that_is_not_finite_changes_neither_weights_nor_moments(poison):
    batch, policy = make_batch(), make_policy()
    update, optimizer = make_update(make_config(), policy)
    update.run(batch, 0, Steering(), lambda: None, lambda: None)
    before, moments = weights(policy), {k: v.clone() for k, v in optimizer.named_state().items()}
    if poison == "loss":
        poisoned = np.where(np.arange(len(batch.advantages)) == 7, np.nan, batch.advantages)
        batch = dataclasses.replace(batch, advantages=poisoned, mask=np.ones_like(batch.mask))
    else:
        policy.hf.get_submodule("model.norm").register_full_backward_hook(lambda m, i, o: (i[0] * torch.nan,))
    touched = []
    report = update.run(batch, 1, Steering(), lambda: None, lambda: touched.append(1))
    assert report.skipped and report.reason == f"{poison} is not finite on 1 of 1 ranks"
    assert not touched and not report.metrics
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())
    assert all(torch.equal(value, moments[name]) for name, value in optimizer.named_state().items())
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_with_two_mini_batches_the_first_has_ratio_one_and_both_update():
    config, policy = make_config({"num_minibatches": 2}), make_policy()
    update, optimizer = make_update(config, policy)
    boundaries, updates = [], []
    report = update.run(make_batch(), 3, Steering(), lambda: boundaries.append(1), lambda: updates.append(1))
    assert len(updates) == 2 and len(boundaries) % 2 == 0
    assert report.metrics["ppo/first_minibatch_max_abs_log_r"] < 1e-6
    assert report.metrics["ppo/max_abs_log_r"] > 1e-4  # the second is past an update
    assert next(v for k, v in optimizer.named_state().items() if k.endswith(".step")) == 2
    rates = [lr_at(step, 40, 1e-3, 0.05, 0.05, 0.1) for step in (6, 7)]
    assert report.metrics["lr"] == pytest.approx(sum(rates) / 2)


def test_dropout_at_work_would_show_in_the_first_mini_batch():
    policy = make_policy(attention_dropout=0.5)
    policy.hf.train()
    update, _ = make_update(make_config({"num_minibatches": 2}), policy)
    report = update.run(make_batch(), 0, Steering(), lambda: None, lambda: None)
    assert report.metrics["ppo/first_minibatch_max_abs_log_r"] > 1e-2


def test_mini_batches_part_the_groups_among_them():
    config, batch = make_config({"num_minibatches": 3}), make_batch()
    parts = deal(config, batch, batch_tensors(batch, CPU).num_tokens_N, 5, 0, 1)
    groups = [set(batch.group_ids[np.concatenate(part.micro)].tolist()) for part in parts]
    assert sorted(g for group in groups for g in group) == [0, 1, 2, 3]
    assert sum(part.denominator for part in parts) == batch.mask.sum()


def test_the_callbacks_come_with_weights_untouched_until_the_update():
    policy, seen = make_policy(), []
    before = weights(policy)

    def look() -> None:
        seen.append(all(torch.equal(value, before[name]) for name, value in weights(policy).items()))

    update, _ = make_update(make_config(learner={"microbatch_tokens": 40}), policy)
    report = update.run(make_batch(), 0, Steering(), look, look)
    assert not report.skipped and len(seen) > 3 and all(seen)
    assert not torch.equal(weights(policy)["model.norm.weight"], before["model.norm.weight"])


def test_the_gradient_is_clipped_to_its_global_norm_and_the_norm_before_is_reported():
    free, wide = gradients_of(make_config(), make_policy(), make_batch())
    norm = sum((g.double() ** 2).sum().item() for g in free.values()) ** 0.5
    assert wide.metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    tight = make_config(learner={"max_grad_norm": norm / 10})
    got, report = gradients_of(tight, make_policy(), make_batch())
    assert report.metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert distance(got, {name: g / 10 for name, g in free.items()}) < 1e-4


@pytest.mark.parametrize("name", METHODS)
def test_with_no_method_does_the_micro_batch_budget_change_gradient_or_figures(name):
    expected, report = step_of(method_update(name, 10_000), near_batch())
    assert not report.skipped
    for budget in (24, 60):
        got, other = step_of(method_update(name, budget), near_batch())
        assert distance(got, expected) < 1e-5
        assert other.metrics == pytest.approx(report.metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", METHODS)
def test_an_odd_batch_gives_finite_gradients_and_figures_and_the_run_goes_on(name, odd):
    update, batch = method_update(name, 60), ODD[odd]()
    grads, report = step_of(update, batch)
    assert not report.skipped and report.num_tokens == batch.mask.sum()
    assert all_finite(grads, report)
    assert not step_of(update, near_batch(), 1)[1].skipped


def test_a_token_that_could_not_have_been_sampled_shows_in_the_figures_at_their_bound():
    _, report = step_of(method_update("token_mean", 60), ODD["far"]())
    assert report.metrics["is/ratio_max"] == pytest.approx(np.exp(20), rel=1e-4)
    assert report.metrics["mismatch/abs_max"] == 20


def test_answers_that_are_all_equal_give_no_gradient_to_a_method_that_compares_them():
    grads, report = step_of(method_update("token_mean", 60), ODD["equal"]())
    assert grads and not any(g.any() for g in grads.values()) and report.metrics["policy/grad_norm"] == 0


def test_masks_leave_out_some_tokens_and_each_of_the_m2po_masks_has_a_cut_of_its_own():
    masks = METHODS["sequences"]["masks"]
    together = step_of(method_update("sequences", 60), near_batch())[1].metrics
    for name, options in masks.items():
        alone, _ = make_update(make_config(METHODS["sequences"] | {"masks": {name: options}}), make_policy())
        share = step_of(alone, near_batch())[1].metrics[f"mask/{name}"]
        assert 0 < share < 1 and together[f"mask/{name}"] == share


def test_a_mini_batch_that_was_skipped_leaves_the_figures_of_the_other_finite():
    config, batch = make_config({"num_minibatches": 2}), near_batch()
    spoiled = batch.logp_behav.copy()
    spoiled[np.flatnonzero(batch.mask)[0]] = np.nan
    update, _ = make_update(config, make_policy())
    report = step_of(update, dataclasses.replace(batch, logp_behav=spoiled))[1]
    assert not report.skipped and report.reason == "loss is not finite on 1 of 1 ranks"
    assert all_finite({}, report)
