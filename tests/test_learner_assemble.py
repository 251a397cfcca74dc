"""From groups to a batch, and from rows to the result: what a step trains on and what a run says of itself."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config import parse_config
from async_rl.data.record import Record
from async_rl.learner.report.results import summarize
from async_rl.learner.update.assemble import assemble
from async_rl.learner.update.shaping import RewardShaping
from async_rl.types import Attempt, Group, Trajectory

from .ledger_samples import make_prompt, make_trajectory
from .step_cases import METHODS, all_finite, method_update, step_of


def _record(group_id: int, trajectories: list[Trajectory]) -> Record:
    prompt, attempt = make_prompt(group_id), Attempt(1, 0)
    group = Group(group_id, attempt, "train", "r#1", prompt.token_ids, tuple(trajectories))
    return Record(group_id, prompt, attempt, attempt, born=0, size=len(group.trajectories), payload=group)


def _assembled(records: list[Record], version: int, algorithm: dict[str, Any] | None = None, **top: Any):
    tree = {"num_steps": 20, "groups_per_step": 4, "group_size": 4, "model": {"path": "x"}, "algorithm": algorithm or {}}
    config = parse_config(tree | top)
    return assemble(records, version, config, RewardShaping(config.algorithm, config.rollout.max_new_tokens))


def _answers(rewards: list[float], num_tokens: int = 3) -> list[Trajectory]:
    return [dataclasses.replace(make_trajectory([0] * num_tokens), reward=reward) for reward in rewards]


def test_lag_is_counted_per_token_at_consumption() -> None:
    answers = [dataclasses.replace(make_trajectory([3, 3, 4, 5]), reward=r) for r in (0.0, 1.0)]
    batch, metrics = _assembled([_record(0, answers)], 5)
    assert batch.lags.tolist() == [2, 2, 1, 0] * 2
    assert metrics["lag/max"] == 2
    assert metrics["lag/hist"] == [2, 2, 4, 0]
    assert metrics["staleness/versions_per_trajectory"] == 3


def test_an_unscorable_answer_is_masked_and_does_not_move_its_siblings() -> None:
    good = _answers([1.0, 0.0, 0.0])
    for junk in (math.nan, 100.0):
        bad = dataclasses.replace(make_trajectory([0, 0]), reward=junk, error="the reward raised")
        batch, metrics = _assembled([_record(0, [*good, bad])], 0)
        assert batch.mask.tolist() == [True] * 9 + [False] * 2
        assert np.allclose(batch.advantages[:3], [1.1547, -0.57735, -0.57735], atol=1e-4)
        assert metrics["reward/num_invalid"] == 1


@pytest.mark.parametrize(("choice", "trained"), [("keep", 12), ("mask", 6)])
def test_groups_without_variance_are_kept_with_advantage_zero_or_masked(choice: str, trained: int) -> None:
    records = [_record(0, _answers([1.0, 1.0])), _record(1, _answers([0.0, 1.0]))]
    batch, metrics = _assembled(records, 0, {"zero_variance": choice})
    assert int(batch.mask.sum()) == trained
    assert not batch.advantages[:2].any() and batch.advantages[2:].all()
    assert metrics.get("left_out/zero_variance", 0) == (2 if choice == "mask" else 0)
    assert metrics["group/zero_var_frac"] == 0.5


def test_an_answer_that_was_cut_is_marked_or_left_out_and_its_siblings_compared_without_it() -> None:
    cut = dataclasses.replace(make_trajectory([0, 0]), reward=9.0, finish_reason="length")
    batch, metrics = _assembled([_record(0, [*_answers([1.0, 0.0]), cut])], 0)
    assert batch.truncated.tolist() == [False, False, True]
    assert int(batch.mask.sum()) == 8
    batch, metrics = _assembled([_record(0, [*_answers([1.0, 0.0]), cut])], 0, {"overlong": "mask", "advantage": "dr_grpo"})
    assert batch.mask.tolist() == [True] * 6 + [False] * 2
    assert batch.advantages.tolist() == [0.5, -0.5, 0.0]
    assert metrics["left_out/overlong"] == 1


def test_the_greedy_answer_is_the_baseline_and_neither_trained_on_nor_counted() -> None:
    records = [_record(0, _answers([1.0, 0.0, 1.0])), _record(1, _answers([0.0, 1.0, 0.0]))]
    batch, metrics = _assembled(records, 0, {"advantage": "remax"})
    assert batch.advantages.tolist() == [0.0, -1.0, 0.0, 0.0, 1.0, 0.0]
    assert batch.mask.reshape(6, 3).all(1).tolist() == [True, True, False, True, True, False]
    assert (metrics["reward/mean"], metrics["batch/num_samples"]) == (0.5, 4)


SHAPINGS = {
    "ema": {"normalizer": "ema"},
    "debiased_ema": {"normalizer": "debiased_ema"},
    "scale alone": {"normalizer": "ema", "normalizer_options": {"scale_only": True}},
    "clipped": {"normalizer": "ema", "normalizer_options": {"clip": 0.5}},
    "overlong": {"overlong_buffer_tokens": 8},
    "both": {"overlong_buffer_tokens": 8, "normalizer": "debiased_ema"},
}


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_the_greedy_answer_is_shaped_as_those_that_are_compared_with_it(shaping: str) -> None:
    algorithm = {"advantage": "remax"} | SHAPINGS[shaping]
    records = [_record(0, _answers([1.0, 0.0, 1.0, 1.0, 1.0], 6)), _record(1, _answers([0.0, 1.0, 0.0], 6))]
    batch, metrics = _assembled(records, 0, algorithm, rollout={"max_new_tokens": 8})
    better = batch.advantages[6]
    assert better > 0 and batch.advantages.tolist() == pytest.approx([0, -better, 0, 0, 0, 0, better, 0])
    assert batch.mask.reshape(8, 6).all(1).tolist() == [True] * 4 + [False] + [True] * 2 + [False]
    assert metrics["batch/num_samples"] == 6


def test_greedy_answers_move_no_running_scale_of_rewards() -> None:
    tree = {"num_steps": 20, "groups_per_step": 4, "group_size": 4, "model": {"path": "x"}}
    config = parse_config(tree | {"algorithm": {"advantage": "remax", "normalizer": "ema"}})
    states = []
    for greedy in (0.0, 100.0):
        shaping = RewardShaping(config.algorithm, 256)
        assemble([_record(0, _answers([1.0, 0.0, greedy]))], 0, config, shaping)
        states.append(shaping.state)
    assert states[0] == states[1] == {"mean": 0.5, "variance": 0.5}


def test_answers_are_not_compared_with_a_greedy_one_that_could_not_be_scored() -> None:
    bad = dataclasses.replace(make_trajectory([0, 0]), reward=100.0, error="the reward raised")
    records = [_record(0, [*_answers([1.0, 0.0]), bad]), _record(1, _answers([1.0, 0.0]))]
    batch, _ = _assembled(records, 0, {"advantage": "remax"})
    assert batch.advantages.tolist() == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert batch.mask.tolist() == [False] * 8 + [True] * 3 + [False] * 3


def test_without_siblings_rewards_are_what_is_learnt_from() -> None:
    junk = dataclasses.replace(make_trajectory([0]), reward=math.nan)
    batch, _ = _assembled([_record(0, [*_answers([2.0]), junk])], 0, {"advantage": "reinforce_pp"}, group_size=1)
    assert batch.rewards.tolist() == [2.0, 0.0]
    assert batch.mask.tolist() == [True] * 3 + [False]


def test_rewards_are_scaled_by_what_the_run_has_seen_and_logged_as_they_came() -> None:
    tree = {"num_steps": 20, "groups_per_step": 4, "group_size": 4, "model": {"path": "x"}}
    algorithm = {"advantage": "gae", "normalizer": "debiased_ema", "normalizer_options": {"momentum": 0.5, "min_std": 1e-3}}
    config = parse_config(tree | {"algorithm": algorithm})
    shaping = RewardShaping(config.algorithm, 256)
    batch, metrics = assemble([_record(0, _answers([0.0, 10.0]))], 0, config, shaping)
    assert np.allclose(batch.rewards, [0.0, 2.0]), "the std of 0 and 10 is 5"
    assert (metrics["reward/mean"], metrics["reward/shaped_mean"]) == (5.0, pytest.approx(1.0))
    other = RewardShaping(config.algorithm, 256)
    other.state = dict(shaping.state)
    for shaper in (shaping, other):
        batch, _ = assemble([_record(0, _answers([0.0, 1.0]))], 1, config, shaper)
    assert shaping.state == other.state and 0 < batch.rewards[1] < 1


@pytest.mark.parametrize("now", ["none", "ema", "debiased_ema"])
@pytest.mark.parametrize("before", ["none", "ema", "debiased_ema"])
def test_the_scale_of_another_normalizer_begins_anew_and_that_is_told(before: str, now: str, caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("async_rl"), "propagate", True)  # whatever an earlier test did to it

    def shaping_of(name: str) -> RewardShaping:
        tree = {"num_steps": 20, "groups_per_step": 4, "group_size": 4, "model": {"path": "x"}}
        return RewardShaping(parse_config(tree | {"algorithm": {"advantage": "gae", "normalizer": name}}).algorithm, 256)

    def shape(shaping: RewardShaping, best: float) -> list[float]:
        rewards_N = torch.tensor([0.0, best], dtype=torch.float64)
        all_N, none_N = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
        return shaping.shaped(rewards_N, all_N, torch.ones(2, dtype=torch.int64), none_N).tolist()

    first, again, anew = shaping_of(before), shaping_of(now), shaping_of(now)
    shape(first, 50.0)
    again.load_state_dict(first.state_dict())
    told = f"algorithm.normalizer was {before} and is {now}: its running moments begin anew"
    assert (told in caplog.text) == (before != now and before != "none")
    assert again.state == (first.state if before == now else {})
    assert (shape(again, 10.0) == shape(anew, 10.0)) == (before != now or now == "none")
    with pytest.raises(ValueError, match="no normalizer has the running moments 'mean'"):
        again.load_state_dict({"mean": 0.5})


def test_an_answer_near_the_limit_loses_up_to_one() -> None:
    records = [_record(0, [*_answers([1.0], num_tokens=6), *_answers([1.0], num_tokens=8)])]
    algorithm = {"advantage": "dr_grpo", "overlong_buffer_tokens": 4}
    batch, _ = _assembled(records, 0, algorithm, rollout={"max_new_tokens": 8})
    assert batch.rewards.tolist() == [0.5, 0.0]


def test_shuffled_rewards_are_the_same_rewards_elsewhere_and_reported_unshuffled() -> None:
    records = [_record(i, _answers([float(i % 2)] * 4)) for i in range(8)]
    batch, metrics = _assembled(records, 2, {"shuffle_rewards": True})
    assert batch.advantages.any(), "groups of equal rewards now differ within"
    assert metrics["reward/mean"] == 0.5
    again, _ = _assembled(records, 2, {"shuffle_rewards": True})
    assert (again.advantages == batch.advantages).all()


def test_answers_without_tokens_and_empty_batches_do_not_crash() -> None:
    empty = [dataclasses.replace(make_trajectory([]), reward=1.0) for _ in range(2)]
    batch, _ = _assembled([_record(0, empty)], 0)
    assert batch.num_trajectories == 0
    mixed, _ = _assembled([_record(0, [*empty[:1], *_answers([0.0, 1.0])])], 0)
    assert mixed.num_trajectories == 2


def test_scores_are_means_over_the_valid_answers_that_have_them() -> None:
    given = ({"length": 4.0}, {"length": 2.0, "format": 1.0}, {"length": 100.0})
    answers = [dataclasses.replace(t, scores=s) for t, s in zip(_answers([1.0, 0.0, math.nan]), given, strict=True)]
    _, metrics = _assembled([_record(0, answers)], 0)
    assert {k: v for k, v in metrics.items() if k.startswith("score/")} == {"score/format": 1.0, "score/length": 3.0}


def test_the_result_can_be_recomputed_from_the_rows() -> None:
    steps = [
        {
            "version": k,
            "reward/mean": k / 10,
            "batch/num_tokens": 10 * k,
            "batch/num_samples": 4,
            "lag/mean": float(k % 2),
            "lag/max": k % 2,
            "lag/hist": [1, k, 0],
            "time/step_s": 2.0,
            "idle/batch_s": 0.5,
            "incarnation": 1 if k < 4 else 2,
            "events/invalid/unscorable": k if k < 4 else 10 * k,
            "score/length": float(k),
            **({"score/late": 2.0, "events/invalid/aborted": 1} if k > 8 else {}),
        }
        for k in range(1, 11)
    ]
    evals = [{"eval/version": v, "eval/accuracy": a} for v, a in ((0, 0.3), (5, 0.5), (8, 0.9), (10, 0.7))]
    result = summarize([evals[0], *steps, *evals[1:]], {"balanced": True})
    assert result["reward_first"] == pytest.approx(0.3)
    assert result["reward_last"] == pytest.approx(0.8)
    assert result["eval_first"] == 0.3
    assert result["eval_last"] == 0.7, "the median of the last three"
    assert result["lag_mean"] == pytest.approx(250 / 550), "weighted by tokens"
    assert result["lag_max"] == 1
    assert result["lag_hist"] == [10, 55, 0]
    assert result["samples_per_s"] == 2.0
    assert result["idle_s"]["batch"] == 5.0
    assert result["scores"] == {"length": {"first": 3.0, "last": 8.0}, "late": {"first": 2.0, "last": 2.0}}
    assert result["invalid"] == {"unscorable": 103, "aborted": 1}, "counted anew in each life of the learner"
    assert result["num_invalid"] == 104
    assert summarize(steps, {}, {2: {"TypeError": 7}})["invalid"] == {"unscorable": 3, "TypeError": 7}, "known better"


def test_answers_that_could_not_be_used_are_counted_also_without_a_step_and_by_few_reasons() -> None:
    lives = {life: {f"E{life}.{n}": n + 1 for n in range(12)} for life in (1, 2)}
    result = summarize([{"eval/version": 0, "eval/accuracy": None, "eval/unscored": 8}], {}, lives)
    assert result["num_invalid"] == sum(result["invalid"].values()) == 2 * 78
    assert len(result["invalid"]) == 16 and result["invalid"]["E1.11"] == 12
    assert (result["eval_unscored"], result["evals"]) == (8, [])


def test_the_last_accuracy_never_counts_the_evaluation_before_the_first_step() -> None:
    evals = [{"eval/version": v, "eval/accuracy": a} for v, a in ((0, 0.3), (20, 0.8))]
    assert summarize(evals, {})["eval_last"] == 0.8
    assert summarize(evals[:1], {})["eval_last"] == 0.3


def test_a_run_that_went_on_with_another_bound_and_lost_a_row_of_timing_has_a_result() -> None:
    row = {"version": 1, "reward/mean": 0.5, "batch/num_tokens": 4, "batch/num_samples": 2, "lag/mean": 0.0, "lag/max": 0}
    result = summarize([row | {"lag/hist": [4, 0, 0, 0], "time/step_s": 2.0}, row | {"lag/hist": [4, 0]}], {})
    assert result["lag_hist"] == [8, 0, 0, 0] and result["steps_s"] == 2.0


def test_a_run_that_ended_before_its_first_step_has_a_result_too() -> None:
    result = summarize([], {"balanced": True})
    assert result["steps"] == 0
    assert result["eval_last"] is None


def test_rows_that_somebody_else_wrote_cost_a_run_no_result() -> None:
    own = {"version": 4, "reward/mean": 0.5, "batch/num_tokens": 4, "batch/num_samples": 2, "lag/mean": 0.5, "lag/max": 1}
    odd = [{"step": 3, "reward/mean": 1.0}, {"reward/mean": "high", "lag/hist": 7, "version": None}, {"eval/accuracy": 0.5}]
    result = summarize([own | {"lag/hist": [2, 2]}, *odd], {})
    assert (result["policy_version"], result["lag_mean"], result["lag_max"], result["lag_hist"]) == (4, 0.5, 1, [2, 2])
    assert (result["reward_last"], result["evals"]) == (0.75, [[None, 0.5]])


@pytest.mark.parametrize("method", METHODS)
def test_a_reward_of_nan_equal_rewards_and_answers_of_one_token_are_counted_and_trained_on(method: str) -> None:
    records = [
        _record(1, _answers([1.0, 0.0, math.nan])),
        _record(2, _answers([1.0, 1.0])),
        _record(3, _answers([0.0, 1.0], 1)),
    ]
    batch, metrics = _assembled(records, 0, METHODS[method])
    assert metrics["reward/num_invalid"] == 1
    assert np.isfinite(batch.rewards).all() and np.isfinite(batch.advantages).all()
    assert int(batch.mask.sum()) == 6 + 6 + 2, "the answer that could not be scored is left out"
    grads, report = step_of(method_update(method, 60), batch)
    assert not report.skipped and report.num_tokens == 14 and all_finite(grads, report)
