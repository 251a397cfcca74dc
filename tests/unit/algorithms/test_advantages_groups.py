"""Group baselines against the golden numbers, loops as the papers write them, and what must hold for any rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms import filters
from async_rl.algorithms.advantages import ADVANTAGES, comparable, grpo, grpo_batch_std, opo, remax, rloo
from async_rl.algorithms.filters import zero_variance

from .estimator_cases import bools, cases, close, f64

CENTERED = ("grpo", "dr_grpo", "grpo_batch_std", "rloo", "reinforce_pp_baseline")  # their sum over a group is 0
STANDARD = ("grpo", "grpo_batch_std")  # any scale and offset of the rewards is undone


def everything(n: int) -> torch.Tensor:
    return torch.ones(n, dtype=torch.bool)


def advantage(name, rewards, groups, valid) -> torch.Tensor:
    """By name, with lengths 1, 2, 3 .. and a greedy reward that is the same for a whole group."""
    lengths = torch.arange(len(rewards)) + 1
    return ADVANTAGES[name](rewards, groups, valid, lengths_N=lengths, greedy_N=groups.double() / 4)


@cases("grpo_advantage")
def test_group_advantages_are_the_golden_ones(inputs, expected, tol):
    ids = {name: k for k, name in enumerate(dict.fromkeys(inputs["group"]))}
    groups = torch.tensor([ids[name] for name in inputs["group"]])
    rewards, valid = f64(inputs["rewards"]), everything(len(groups))
    options = {key: inputs[key] for key in ("eps", "ddof", "norm_std")}
    close(grpo(rewards, groups, valid, **options), expected["adv"], tol)
    if not inputs["norm_std"]:
        close(ADVANTAGES["dr_grpo"](rewards, groups, valid), expected["adv"], tol)


@cases("rloo_advantage")
def test_leave_one_out_is_the_golden_one(inputs, expected, tol):
    close(rloo(f64(inputs["rewards"]), torch.tensor(inputs["group"]), everything(len(inputs["group"]))), expected["adv"], tol)


@cases("opo_advantage")
def test_the_length_weighted_baseline_is_the_golden_one(inputs, expected, tol):
    rewards, groups, lengths = f64(inputs["rewards"]), torch.tensor(inputs["group"]), torch.tensor(inputs["lengths"])
    close(opo(rewards, groups, everything(len(groups)), lengths_N=lengths), expected["adv"], tol)


@cases("remax_advantage")
def test_the_greedy_baseline_is_the_golden_one(inputs, expected, tol):
    rewards, groups = f64(inputs["rewards"]), torch.zeros(len(inputs["rewards"]), dtype=torch.int64)
    close(remax(rewards, groups, everything(len(groups)), greedy_N=f64(inputs["greedy_rewards"])), expected["adv"], tol)


def slow_advantages(name, rewards, groups, valid):
    out = []
    kept = [g for g, v in zip(groups, valid, strict=True) if v]
    batch = [r for r, g, v in zip(rewards, groups, valid, strict=True) if v and kept.count(g) >= 2]
    for i in range(len(rewards)):
        mine = [j for j in range(len(rewards)) if valid[j] and groups[j] == groups[i]]
        if name == "remax":
            out.append(rewards[i] - groups[i] / 4 if valid[i] else 0.0)
            continue
        if not valid[i] or len(mine) < 2 or std([rewards[j] for j in mine]) < 1e-6:
            out.append(0.0)
            continue
        mean = math.fsum(rewards[j] for j in mine) / len(mine)
        others = [rewards[j] for j in mine if j != i]
        out.append(
            {
                "grpo": (rewards[i] - mean) / (std([rewards[j] for j in mine]) + 1e-6),
                "dr_grpo": rewards[i] - mean,
                "reinforce_pp_baseline": rewards[i] - mean,
                "grpo_batch_std": (rewards[i] - mean) / (std(batch) + 1e-6),
                "rloo": rewards[i] - math.fsum(others) / len(others),
                "opo": rewards[i] - math.fsum((j + 1) * rewards[j] for j in mine) / sum(j + 1 for j in mine),
            }[name]
        )
    return out


def std(x):
    mean = math.fsum(x) / len(x)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in x) / (len(x) - 1))


reward = st.one_of(st.sampled_from([0.0, 1.0, 0.1, 0.7]), st.floats(-10, 10).map(lambda x: round(x, 3)))
members = st.lists(st.tuples(reward, st.integers(0, 3), st.booleans()), max_size=16)


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=100, deadline=None)
@given(rows=members)
def test_advantages_equal_their_plain_loop_for_groups_in_any_order(name, rows):
    values, groups, valid = ([row[k] for row in rows] for k in range(3))
    args = (f64(values), torch.tensor(groups, dtype=torch.int64), bools(valid))
    got = advantage(name, *args)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got, slow_advantages(name, values, groups, valid), rtol=1e-6, atol=1e-9)
    for g in set(groups) if name in STANDARD else ():
        mine = [r for r, h, v in rows if h == g and v]
        assert zero_variance(mine) == (not any(a != 0 for a, h in zip(got.tolist(), groups, strict=True) if h == g))
    assert comparable(*args).tolist() == [v and sum(h == g and w for _, h, w in rows) >= 2 for _, g, v in rows]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.floats(0.5, 20), st.floats(-100, 100))
def test_advantages_sum_to_zero_and_a_std_undoes_an_affine_map_of_the_rewards(rewards, gain, offset):
    groups, valid = torch.arange(len(rewards)) % 2, everything(len(rewards))
    for name in CENTERED:
        got = ADVANTAGES[name](f64(rewards), groups, valid)
        for g in (0, 1):
            assert float(got[groups == g].sum()) == pytest.approx(0, abs=1e-9)
    for name in STANDARD:
        mapped = ADVANTAGES[name](f64(rewards) * gain + offset, groups, valid)
        assert torch.allclose(mapped, ADVANTAGES[name](f64(rewards), groups, valid), atol=1e-4)
    lengths = torch.arange(len(rewards)) + 1
    weighted = lengths * opo(f64(rewards), groups, valid, lengths_N=lengths)
    assert float(weighted[groups == 0].sum()) == pytest.approx(0, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=12))
def test_leave_one_out_is_the_mean_baseline_times_k_over_k_minus_one(rewards):
    groups, valid, k = torch.zeros(len(rewards), dtype=torch.int64), everything(len(rewards)), len(rewards)
    mean = grpo(f64(rewards), groups, valid, norm_std=False)
    assert torch.allclose(rloo(f64(rewards), groups, valid), mean * k / (k - 1), atol=1e-12)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_rows_may_come_in_any_order(name):
    rewards, groups, valid = f64([1, 0, 3, 4, 4, 9]), torch.tensor([5, 9, 5, 9, 9, 5]), everything(6)
    order, lengths = torch.tensor([3, 0, 5, 1, 4, 2]), torch.tensor([1, 2, 3, 4, 5, 6])
    greedy, there = f64([0.5, 1, 0.5, 1, 1, 0.5]), lambda x: x[order]
    got = ADVANTAGES[name](rewards, groups, valid, lengths_N=lengths, greedy_N=greedy)
    moved = ADVANTAGES[name](*map(there, (rewards, groups, valid)), lengths_N=there(lengths), greedy_N=there(greedy))
    assert torch.equal(got[order], moved)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_reward_of_an_invalid_row_changes_no_other_advantage_by_a_bit(name):
    groups, valid = torch.tensor([0, 0, 0, 1, 1]), bools([1, 1, 0, 1, 1])
    one = advantage(name, f64([1, 0, 1, 2, 5]), groups, valid)
    for other in (100, math.nan, math.inf):
        assert torch.equal(one, advantage(name, f64([1, 0, other, 2, 5]), groups, valid))


def test_an_unscorable_sibling_changes_no_advantage_and_enters_no_loss():
    groups, valid = torch.zeros(4, dtype=torch.int64), everything(4)
    rewards = f64([1, math.nan, 0, math.nan])
    assert grpo(rewards, groups, valid).tolist() == pytest.approx([0.7071, 0, -0.7071, 0], abs=1e-4)
    assert comparable(rewards, groups, valid).tolist() == [True, False, True, False]
    alone = f64([1, math.nan, math.nan, math.nan])
    assert not comparable(alone, groups, valid).any()
    assert not grpo(alone, groups, valid).any()


def test_a_greedy_baseline_needs_no_sibling_but_must_have_been_scored():
    groups, valid, greedy = torch.tensor([0, 1]), everything(2), f64([0.4, math.nan])
    assert comparable(f64([1, 1]), groups, valid, greedy).tolist() == [True, False]
    assert remax(f64([1, 1]), groups, valid, greedy_N=greedy).tolist() == pytest.approx([0.6, 0])


@pytest.mark.parametrize("name", [n for n in ADVANTAGES if n != "remax"])
@pytest.mark.parametrize("value", [0.7, 1e9 + 0.1, 1e12 + 0.1, -3.3])
def test_equal_rewards_give_exactly_zero_even_from_fp32(name, value):
    rewards = torch.full((7,), value, dtype=torch.float32)
    assert not advantage(name, rewards, torch.zeros(7, dtype=torch.int64), everything(7)).any()
    assert not advantage(name, f64([value] * 7), torch.zeros(7, dtype=torch.int64), everything(7)).any()
    assert filters.zero_variance(rewards.numpy())


@pytest.mark.parametrize("name", [n for n in ADVANTAGES if n != "remax"])
def test_differences_below_the_resolution_of_a_reward_are_no_signal(name):
    assert not advantage(name, f64([1, 1 + 1e-7]), torch.zeros(2, dtype=torch.int64), everything(2)).any()


def test_a_std_over_the_batch_does_not_blow_a_quiet_group_up():
    rewards, groups = f64([0.5, 0.501, 0, 1, 3]), torch.tensor([0, 0, 1, 1, 2])
    got = grpo_batch_std(rewards, groups, everything(5), eps=0.0)
    spread = float(rewards[:4].std())  # the lonely one has no part in it
    close(got, [-0.0005 / spread, 0.0005 / spread, -0.5 / spread, 0.5 / spread, 0], 1e-9)


def test_answers_without_a_token_weigh_nothing_and_a_group_of_them_has_no_baseline():
    groups, valid = torch.tensor([0, 0, 0, 1, 1]), everything(5)
    got = opo(f64([1, 0, 4, 1, 0]), groups, valid, lengths_N=torch.tensor([10, 30, 0, 0, 0]))
    close(got, [0.75, -0.25, 3.75, 0, 0])


def test_what_a_baseline_needs_is_asked_for_by_name():
    two, groups = f64([0, 1]), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"opo .*: give lengths_N"):
        opo(two, groups, everything(2))
    with pytest.raises(ValueError, match=r"remax .*: give greedy_N"):
        remax(two, groups, everything(2))
    with pytest.raises(ValueError, match="lengths has shape"):
        opo(two, groups, everything(2), lengths_N=two[:1])
    with pytest.raises(ValueError, match="greedy has shape"):
        remax(two, groups, everything(2), greedy_N=two[:1])
    with pytest.raises(ValueError, match="group_ids has shape"):
        grpo(two, groups[:1], everything(2))
