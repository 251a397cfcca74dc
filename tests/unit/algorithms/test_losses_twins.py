"""Losses, weights and masks against plain loops: value and gradient in float64, over random ragged masks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms.corrections import CORRECTIONS, LEVELS, MODES
from async_rl.algorithms.losses import AGGREGATION_OF, LOSSES
from async_rl.algorithms.masks import MASKS, m2po_squares, m2po_threshold

from . import loss_twins as slow
from .loss_cases import aggregated, f64, flat, gradient, index_of, make_terms
from .loss_twins import Token

logps = st.one_of(st.floats(-30, 0), st.floats(-2, 0))
advantages = st.one_of(st.just(0.0), st.floats(-5, 5))
importance = st.floats(0, 3)
any_token = st.builds(Token, logps, logps, logps, advantages, importance, st.booleans())
ragged = st.lists(st.lists(any_token, max_size=6), min_size=1, max_size=5)


@st.composite
def one_advantage_per_sequence(draw) -> list[list[Token]]:
    rows = draw(ragged)
    return [[t._replace(adv=row[0].adv, weight=row[0].weight) for t in row] for row in rows]


between = st.floats
clip = {"eps_low": between(0.05, 0.5), "eps_high": between(0.05, 0.5), "dual_clip": st.one_of(st.none(), between(1.1, 5))}
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": clip,
    "bypass_ppo": clip,
    "decoupled_ppo": clip,
    "gspo": {"eps_low": between(1e-4, 0.5), "eps_high": between(1e-4, 0.5)},
    "cispo": {"low": between(0, 0.9), "high": between(1.1, 8)},
    "aipo": {"delta": between(1, 10)},
    "topr": {},
    "sapo": {"tau_pos": between(0.1, 3), "tau_neg": between(0.1, 3)},
    "dppo_tv": {"tv_high": between(0.01, 0.5), "tv_low": between(0.01, 0.5), "kl_tau": between(0, 1)},
    "kimi_k15": {"tau": between(0.01, 2)},
    "kimi_pmd": {"tau": between(0.01, 2)},
}


def terms_of(rows: list[list[Token]]):
    columns = list(zip(*flat(rows), strict=True)) or [()] * 6
    prox, behav, adv, weight, mask = columns[1:]
    named = {"prox": prox, "behav": behav, "adv": adv, "weight": weight, "mask": mask}
    return make_terms(columns[0], sequence=index_of(rows), num_sequences=len(rows), **named)


def assert_same(got, want):
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=1e-6, atol=1e-6)


def test_every_loss_has_a_twin_and_those_of_sequences_an_aggregation():
    assert set(slow.TOKEN_TWINS) | set(slow.SEQUENCE_TWINS) == set(LOSSES) == set(OPTIONS)
    assert set(slow.SEQUENCE_TWINS) == set(AGGREGATION_OF)


@pytest.mark.parametrize("name", slow.TOKEN_TWINS)
@settings(max_examples=50, deadline=None)
@given(ragged, st.data())
def test_a_token_loss_equals_its_plain_loop(name, rows, data):
    options = data.draw(st.fixed_dictionaries(OPTIONS[name]))
    nothing = (0.0, 0.0, False, False, False)
    want = [slow.TOKEN_TWINS[name](t, **options) if t.trained else nothing for t in flat(rows)]
    terms = terms_of(rows)
    got = LOSSES[name](terms, **options)
    columns = [got.loss.detach(), gradient(terms, got.loss.sum()), *got[1:]]
    for fast, twin in zip(columns, zip(*want, strict=True) if want else [()] * 5, strict=True):
        assert_same(fast, twin)


@pytest.mark.parametrize("name", slow.SEQUENCE_TWINS)
@settings(max_examples=50, deadline=None)
@given(one_advantage_per_sequence(), st.data())
def test_a_sequence_loss_equals_its_plain_loop_under_its_aggregation(name, rows, data):
    options = data.draw(st.fixed_dictionaries(OPTIONS[name]))
    want, want_slopes = slow.sequence_step(name, rows, **options)
    terms = terms_of(rows)
    got = aggregated(name, terms, AGGREGATION_OF[name], **options)
    assert_same(got.detach(), want)
    assert_same(gradient(terms, got), want_slopes)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20, deadline=None)
@given(ragged, st.floats(0.1, 0.95), st.floats(1.05, 5))
def test_weights_equal_their_plain_loop(level, mode, rows, low, high):
    want = []
    for row in rows:
        trained = [t for t in row if t.trained]
        each = iter(slow.weight(trained, level, mode, low, high) if trained else [])
        want += [next(each) if t.trained else 0.0 for t in row]
    terms = terms_of(rows)
    assert_same(CORRECTIONS[f"{level}_{mode}"](*terms[1:3], *terms[5:], low=low, high=high), want)


near = st.floats(-0.5, 0.5).map(lambda x: round(x, 2))


@pytest.mark.parametrize("harmful_only", [True, False])
@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(near, near, advantages, st.booleans()), max_size=12), st.floats(0.005, 0.2))
def test_m2po_drops_what_a_plain_loop_drops_however_the_batch_is_split(harmful_only, drawn, tau):
    tokens = [Token(-1 + logp, -1 + prox, -1.0, adv, 1.0, m) for logp, prox, adv, m in drawn]
    name, parts = "m2po" if harmful_only else "m2po_all", [terms_of([tokens[k::3]]) for k in range(3)]
    squares = [
        m2po_squares(t.logp_R if harmful_only else t.logp_prox_R, *t[2:4], t.mask_R, harmful_only=harmful_only) for t in parts
    ]
    cut = m2po_threshold(torch.cat(squares), tau=tau)
    keep = [MASKS[name](t, cut=cut).tolist() for t in parts]
    assert [keep[i % 3][i // 3] for i in range(len(tokens))] == slow.m2po_keep(tokens, harmful_only, tau)


@settings(max_examples=50, deadline=None)
@given(one_advantage_per_sequence(), st.floats(0.05, 3))
def test_opsm_drops_what_a_plain_loop_drops(rows, delta):
    want = []
    for row in rows:
        trained = [t for t in row if t.trained]
        drop = bool(trained) and row[0].adv < 0 and sum(t.behav - t.logp for t in trained) / len(trained) > delta
        want += [t.trained and not drop for t in row]
    assert MASKS["opsm"](terms_of(rows), delta=delta).tolist() == want


@settings(max_examples=20, deadline=None)
@given(ragged, st.floats(0.01, 0.95), st.floats(1.05, 100))
def test_sequence_bounds_and_the_veto_drop_what_a_plain_loop_drops(rows, low, high):
    statistics = {
        "sequence_product": lambda logs: math.exp(max(-20, min(20, sum(logs)))),
        "sequence_geomean": lambda logs: math.exp(sum(logs) / len(logs)),
        "sequence_k3_mean": lambda logs: sum(math.exp(x) - 1 - x for x in logs) / len(logs),
        "veto": lambda logs: math.exp(min(logs)),
    }
    terms = terms_of(rows)
    for name, statistic in statistics.items():
        options: dict[str, Any] = {"threshold": low} if name == "veto" else {"low": low, "high": high}
        want = []
        for row in rows:
            logs = [slow.log_ratio(t.prox, t.behav) for t in row if t.trained]
            value = statistic(logs) if logs else 1.0
            want += [t.trained and low <= value <= (math.inf if name == "veto" else high) for t in row]
        assert MASKS[name](terms, **options).tolist() == want


def test_m2po_without_a_candidate_keeps_everything_that_is_trainable():
    assert float(m2po_threshold(f64([-1.0, -1.0]), tau=0.04)) == -1
    assert float(m2po_threshold(f64([]), tau=0.04)) == -1
    terms = make_terms([-2.0, -1.0], behav=[-1.0, -1.0], adv=[1.0, 1.0], mask=[True, False])
    assert MASKS["m2po"](terms, cut=f64(-1.0)).tolist() == [True, False]


def test_m2po_drops_even_the_smallest_when_it_is_too_large_and_never_splits_equals():
    assert float(m2po_threshold(f64([1.0, 4.0]), tau=0.04)) == -1
    assert float(m2po_threshold(f64([0.01, 0.06, 0.06]), tau=0.04)) == 0.01
    assert float(m2po_threshold(f64([0.06, -1.0, 0.01]), tau=0.04)) == 0.06
