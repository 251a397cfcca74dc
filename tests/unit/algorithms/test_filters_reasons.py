"""What is left out of a group, for which reason, and in which order the reasons are looked for."""

from __future__ import annotations

import numpy as np
import pytest

from async_rl.algorithms.filters import count_reasons, group_reasons, overlong, stale
from async_rl.types import FinishReason, Trajectory


def answer(reward=1.0, versions=(5, 5), finish: FinishReason = "stop", mask=None) -> Trajectory:
    ids = np.zeros(len(versions), np.int32)
    return Trajectory(
        token_ids=ids,
        logprobs=np.full(len(ids), -1, np.float32),
        incarnations=ids,
        versions=np.asarray(versions, np.int32),
        mask=np.ones(len(ids), bool) if mask is None else np.asarray(mask, bool),
        finish_reason=finish,
        reward=reward,
    )


def reasons(*answers, **options) -> list[str]:
    return group_reasons(answers, version=5, max_staleness=2, **options)


def test_an_answer_is_stale_by_its_oldest_sampled_token():
    assert [stale(answer(versions=(v, 5)), 5, 2) for v in (5, 3, 2)] == [False, False, True]
    assert not stale(answer(versions=(0, 5), mask=(0, 1)), 5, 2)
    assert not stale(answer(versions=()), 5, 2)


def test_a_cut_answer_is_left_out_only_when_that_is_asked_for():
    cut = answer(finish="length")
    assert overlong(cut)
    assert not overlong(answer())
    assert reasons(cut, answer()) == ["", ""]
    assert reasons(cut, answer(), drop_overlong=True) == ["overlong", ""]


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_the_first_reason_counts_and_staleness_comes_before_length(finish):
    assert reasons(answer(finish=finish, versions=(0, 0)))[0] == {"abort": "aborted", "error": "error"}[finish]
    assert reasons(answer(finish="length", versions=(0, 0)), drop_overlong=True) == ["stale"]


def test_variance_is_judged_on_those_that_are_left():
    group = (answer(1.0), answer(1.0), answer(0.0, versions=(0, 0)), answer(0.0, finish="error"))
    assert reasons(*group) == ["", "", "stale", "error"]
    assert reasons(*group, drop_zero_variance=True) == ["zero_variance", "zero_variance", "stale", "error"]
    assert reasons(*group[1:], drop_zero_variance=True) == ["singleton", "stale", "error"]
    assert reasons(answer(1.0), answer(0.0), drop_zero_variance=True) == ["", ""]
    assert reasons(*group[2:], drop_zero_variance=True) == ["stale", "error"]


def test_only_what_is_left_out_is_counted():
    assert count_reasons(["", "stale", "", "error", "stale"]) == {"stale": 2, "error": 1}
    assert count_reasons([]) == {}
