"""One evaluation's book-keeping: draws, leases, results, and what may not be mixed into them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from async_rl.data.evaluation import Evaluation, is_eval_id, sampled_by
from async_rl.data.record import Record
from async_rl.types import Attempt, WeightName
from tests.ledger_samples import make_group, make_prompt, make_trajectory

PROMPTS = [make_prompt(i) for i in range(10)]


def evaluation(draws: int = 16, seed: int = 3, name: tuple[int, int] = (1, 5)) -> Evaluation:
    return Evaluation(PROMPTS, draws, seed, WeightName(*name), 60.0)


def leases(e: Evaluation) -> list[tuple[int, str]]:
    taken = []
    while (lease := e.next_lease()) is not None:
        taken.append((lease[0], lease[1].prompt_id))
    return taken


def test_the_draws_depend_on_the_seed_only():
    first, later, other = leases(evaluation()), leases(evaluation(name=(2, 9))), leases(evaluation(seed=4))
    assert [p for _, p in first] == [p for _, p in later] != [p for _, p in other]
    assert len(first) == 16 and len({p for _, p in first}) < 16, "drawn with replacement from ten"


def test_ids_are_apart_from_training_from_other_versions_and_from_other_lives():
    ids = [{g for g, _ in leases(evaluation(name=name))} for name in ((1, 5), (1, 6), (2, 5), (0, 0))]
    assert len(set.union(*ids)) == 4 * 16
    assert all(is_eval_id(g) and g < 1 << 63 for group in ids for g in group)
    assert not is_eval_id(0) and not is_eval_id(10**12)


def test_a_summary_says_how_many_answers_could_not_be_scored_and_why():
    e = evaluation(draws=3)
    ids = [g for g, _ in leases(e)]
    assert e.summary() == "unknown (0 answers, 3 missing)"
    for group_id, error in zip(ids, ("raised TypeError: no", "raised KeyError: x"), strict=False):
        e.deliver(group_id, True, math.nan, dataclasses.replace(make_trajectory([5]), reward=math.nan, error=error))
    assert e.summary() == "unknown (0 answers, 1 missing, 2 could not be scored, the first: raised TypeError: no)"
    e.deliver(ids[2], True, 1.0, make_trajectory([5]))
    assert e.summary().startswith("1.000 (1 answers, 0 missing, 2 could not be scored")


def test_a_summary_of_more_draws_than_prompts_says_how_many_prompts_were_answered():
    e = evaluation(draws=64)
    assert e.summary() == "unknown (0 answers, 64 missing)"
    asked = leases(e)
    for group_id, _ in asked[:40]:
        e.deliver(group_id, True, 1.0)
    assert e.summary() == f"1.000 (40 answers to {len({p for _, p in asked[:40]})} prompts, 24 missing)"
    e = evaluation(draws=len(PROMPTS))
    for group_id, _ in leases(e):
        e.deliver(group_id, True, 1.0)
    assert e.summary() == "1.000 (10 answers, 0 missing)"


def test_accuracy_is_the_mean_over_what_was_delivered_and_missing_is_counted():
    e = evaluation(draws=4)
    assert math.isnan(e.accuracy) and e.missing == 4 and not e.done
    ids = [g for g, _ in leases(e)]
    assert e.deliver(ids[0], True, 1.0) and e.deliver(ids[1], True, 0.0) and e.deliver(ids[2], True, 1.0)
    assert e.accuracy == pytest.approx(2 / 3) and e.missing == 1 and not e.done and e.out == [ids[3]]
    assert e.deliver(ids[3], True, 0.0)
    assert e.done and e.missing == 0 and e.accuracy == 0.5
    assert e.row() == {
        "eval/version": 5,
        "eval/incarnation": 1,
        "eval/accuracy": 0.5,
        "eval/num": 4,
        "eval/missing": 0,
        "eval/mixed": 0,
        "eval/unscored": 0,
    }


def test_answers_of_other_weights_or_without_a_reward_are_counted_and_not_used():
    e = evaluation(draws=3)
    ids = [g for g, _ in leases(e)]
    e.deliver(ids[0], False, 1.0)
    e.deliver(ids[1], True, math.nan)
    e.deliver(ids[2], True, 0.0)
    assert (e.mixed, e.unscored, e.num_delivered, e.missing) == (1, 1, 1, 0)
    assert e.accuracy == 0.0 and e.done


def test_answers_are_kept_in_the_order_of_the_draws_and_scores_are_of_those_that_count():
    e = evaluation(draws=4)
    ids = [g for g, _ in leases(e)]
    scored = [
        dataclasses.replace(make_trajectory([5]), scores=scores) for scores in ({"a": 1.0}, {"a": 0.0, "b": 3.0}, {"a": 9.0})
    ]
    e.deliver(ids[2], True, 0.0, scored[1])
    e.deliver(ids[0], True, 1.0, scored[0])
    e.deliver(ids[1], False, 1.0, scored[2])
    assert not e.deliver(ids[1], True, 1.0, scored[0])
    assert [(a.trajectory, a.pinned) for a in e.answered()] == [(scored[0], True), (scored[2], False), (scored[1], True)]
    assert [a.prompt.prompt_id for a in e.answered()] == [p for _, p in leases(evaluation(draws=4))][:3]
    assert e.row() | {"eval/score/a": 0.5, "eval/score/b": 3.0} == e.row()


def test_an_answer_nobody_waits_for_changes_nothing():
    e, older = evaluation(draws=2), evaluation(draws=2, name=(1, 4))
    stale = leases(older)[0][0]
    first = e.next_lease()
    assert first is not None
    assert not e.deliver(stale, True, 1.0)
    assert not e.deliver(first[0] + 1, True, 1.0), "not leased yet"
    assert not e.deliver(0, True, 1.0)
    assert e.deliver(first[0], True, 1.0) and not e.deliver(first[0], True, 0.0)
    assert (e.num_delivered, e.missing, e.accuracy) == (1, 1, 1.0)


def test_leases_of_a_dead_rollout_are_handed_out_again_first():
    e = evaluation(draws=5)
    ids = [lease[0] for _ in range(4) if (lease := e.next_lease())]
    e.deliver(ids[0], True, 1.0)
    assert e.give_back({ids[0], ids[1], ids[2], 77}) == 2
    assert [g for g, _ in leases(e)] == [ids[1], ids[2], ids[3] + 1]
    assert e.missing == 4


def test_an_evaluation_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="0 draws"):
        evaluation(draws=0)
    with pytest.raises(ValueError, match="from 0 prompts"):
        Evaluation([], 4, 0, WeightName(1, 0), 1.0)


@pytest.mark.parametrize(
    ("versions", "incarnations", "expected"),
    [([5, 5], 1, True), ([5, 6], 1, False), ([4], 1, False), ([5, 5], [1, 2], False), ([], 1, True)],
)
def test_pinned_means_that_every_sampled_token_is_of_the_named_weights(versions, incarnations, expected):
    record = Record(1 << 62, PROMPTS[0], Attempt(1, 0), Attempt(1, 0), born=0, size=2)
    group = make_group(record, versions, incarnations, split="eval")
    assert sampled_by(group, WeightName(1, 5)) is expected
    observed = dataclasses.replace(group, trajectories=(make_trajectory([4, 5], mask=[False, True]),))
    assert sampled_by(observed, WeightName(1, 5))
