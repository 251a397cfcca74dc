"""What the learner counts of answers that it cannot use, and how rarely it says so."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from async_rl.learner.control.screen import MAX_KINDS, Screen
from async_rl.types import Attempt, Group

from .ledger_samples import make_trajectory
from .scripted_members import make_config


class FakeLedger:
    """Takes whatever is dropped."""

    def drop(self, group_ids: list[int], reason: str) -> None:
        pass


class Sifted:
    """A screen, what it said, and groups with the given errors for it."""

    def __init__(self, **algorithm: Any) -> None:
        self.notices: list[str] = []
        self.events: Counter[str] = Counter()
        config = make_config(algorithm=algorithm)
        self.screen = Screen(config, 1000, cast(Any, FakeLedger()), self.events, self.notices.append)

    def sift(self, *errors: str) -> None:
        answer = make_trajectory([0])
        siblings = tuple(dataclasses.replace(answer, reward=math.nan if e else 1.0, error=e) for e in errors)
        self.screen.sift(Group(0, Attempt(1, 0), "train", "r0", np.zeros(2, np.int32), siblings))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("reward my:score raised TypeError: unsupported operand: int", "TypeError"),
        ("reward my:score raised AssertionError: ", "AssertionError"),
        ("reward my:score was not scored: PicklingError: no", "PicklingError"),
        ("ZeroDivisionError: reward bug", "ZeroDivisionError"),
        ("reward my:score took longer than 5 s", "unscorable"),
        ("reward my:score returned a str, not one number", "unscorable"),
    ],
)
def test_answers_that_cannot_be_used_are_counted_by_the_type_of_the_exception(error: str, kind: str) -> None:
    sifted = Sifted()
    sifted.sift(error, "", error)
    assert sifted.screen.invalid == {kind: 2} and sifted.events[f"invalid/{kind}"] == 2


def test_the_terminal_hears_of_the_first_bad_answer_and_of_each_doubling() -> None:
    sifted = Sifted()
    for n in range(100):
        sifted.sift(f"reward f raised KeyError: {n}", "", "")
    assert sifted.notices[0] == ("answers that could not be used so far: 1 (1 KeyError), the last: reward f raised KeyError: 0")
    assert [int(notice.split()[8]) for notice in sifted.notices] == [1, 2, 4, 8, 16, 32, 64]
    sifted.sift("", "", "")
    assert len(sifted.notices) == 7


def test_the_kinds_are_bounded_and_none_is_lost() -> None:
    sifted = Sifted()
    for n in range(40):
        sifted.sift(f"E{n}: x", f"E{n}: x")
    assert len(sifted.screen.invalid) == MAX_KINDS
    assert sifted.screen.invalid["other"] == 2 * (40 - MAX_KINDS + 1) and sifted.screen.invalid.total() == 80


@pytest.mark.parametrize(
    ("advantage", "usable", "useless"),
    [
        ("grpo", [("", ""), ("", "", "E: x")], [("",), ("", "E: x")]),
        ("remax", [("", ""), ("", "E: x", "")], [("", "E: x"), ("E: x", "")]),  # the last one is the greedy one
        ("reinforce_pp", [("",), ("", "E: x")], [("E: x",)]),
    ],
)
def test_a_group_is_dropped_when_no_answer_has_what_it_is_compared_with(advantage: str, usable, useless) -> None:
    for errors, dropped in [(errors, 0) for errors in usable] + [(errors, 1) for errors in useless]:
        sifted = Sifted(advantage=advantage)
        sifted.sift(*errors)
        assert sifted.events["groups_dropped_unscorable"] == dropped, errors
