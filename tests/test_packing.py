"""Packing: each trajectory once, the same number of forwards on every rank, little padding, the mask untouched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.data.packing import microbatch, plan
from async_rl.types import Batch

lengths_lists = st.lists(st.integers(0, 300), max_size=60)


def make_batch(prompts: list[int], responses: list[int], seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    num_tokens, num_responses = sum(prompts) + sum(responses), sum(responses)
    return Batch(
        ids=rng.integers(1, 99, num_tokens).astype(np.int32),
        prompt_lengths=np.array(prompts, np.int32),
        response_lengths=np.array(responses, np.int32),
        logp_behav=rng.normal(size=num_responses).astype(np.float32),
        rewards=rng.normal(size=len(prompts)),
        advantages=rng.normal(size=len(prompts)),
        truncated=np.zeros(len(prompts), bool),
        mask=rng.random(num_responses) < 0.5,
        lags=np.zeros(num_responses, np.int32),
        group_ids=np.arange(len(prompts)),
    )


def padded_tokens(lengths: np.ndarray, planned) -> int:
    return sum(len(part) * int(lengths[part].max()) for rank in planned for part in rank if len(part))


@settings(max_examples=300, deadline=None)
@given(lengths_lists, st.integers(1, 5), st.integers(1, 1000))
def test_every_trajectory_is_planned_once_within_the_budget_with_equal_counts_on_all_ranks(lengths, num_ranks, budget):
    planned = plan(np.array(lengths, np.int64), num_ranks, budget)
    assert len(planned) == num_ranks
    assert len({len(rank) for rank in planned}) == 1
    everything = [int(i) for rank in planned for part in rank for i in part]
    assert sorted(everything) == list(range(len(lengths)))
    for rank in planned:
        for part in rank:
            longest = max((lengths[i] for i in part), default=0)
            assert len(part) * longest <= budget or len(part) == 1


@settings(max_examples=100, deadline=None)
@given(lengths_lists.filter(bool), st.integers(1, 5), st.integers(1, 1000))
def test_no_more_rounds_than_filling_every_micro_batch_to_the_brim_would_take(lengths, num_ranks, budget):
    runs, room, longest = 0, 0, 0
    for length in sorted(lengths, reverse=True):
        if room < 1:
            runs, longest = runs + 1, max(1, length)
            room = max(1, budget // longest)
        room -= 1
    planned = plan(np.array(lengths), num_ranks, budget)
    assert len(planned[0]) == -(-runs // num_ranks)


def test_a_trajectory_beyond_the_budget_gets_a_micro_batch_of_its_own():
    planned = plan(np.array([10, 500, 10, 10]), 1, 100)
    assert [1] in [part.tolist() for part in planned[0]]
    assert len(planned[0]) == 2


def test_long_prompts_and_long_answers_pack_without_padding_to_the_largest_of_each():
    batch = make_batch([5000, 50, 5000, 50], [50, 5000, 50, 5000])
    lengths = batch.prompt_lengths + batch.response_lengths
    padded = sum(microbatch(batch, part).ids_BL.size for part in plan(lengths, 1, 10_100)[0])
    assert padded / lengths.sum() <= 1.1


def test_one_outlier_pads_no_other_trajectory():
    lengths = np.array([4000] + [20] * 200)
    assert padded_tokens(lengths, plan(lengths, 1, 8192)) / lengths.sum() <= 1.1


def test_ranks_are_balanced_and_waste_little_on_a_long_tailed_mix(capsys):
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5.5, 1.0, 512).astype(np.int64) + 20, 8000)
    report = []
    for num_ranks in (1, 2, 4, 8):
        planned = plan(lengths, num_ranks, 8192)
        waste = padded_tokens(lengths, planned) / lengths.sum() - 1
        work = np.array([[len(p) * (int(lengths[p].max()) if len(p) else 0) for p in rank] for rank in planned])
        lockstep = work.max(axis=0).sum() / (work.sum() / num_ranks)
        report.append(f"{num_ranks} ranks: {work.shape[1]} micro-batches each, padding {waste:.1%}, lockstep {lockstep:.3f}")
        assert waste <= 0.12
        assert lockstep <= 1.15
        assert work.sum(axis=1).max() / work.sum(axis=1).mean() <= 1.1
    with capsys.disabled():
        print("\n" + "\n".join(report))


def test_micro_batches_of_like_cost_run_in_the_same_round():
    lengths = np.array([100, 60, 55] + [10] * 20)
    planned = plan(lengths, 2, 100)
    sizes = np.array([[lengths[part].sum() for part in rank] for rank in planned])
    assert sizes.max(axis=0).tolist() == [100, 100, 55]  # in order of length they would take 100, 100 and 100


def test_few_short_trajectories_are_shared_by_all_ranks_rather_than_left_to_one():
    planned = plan(np.full(128, 12), 2, 8192)
    assert [[len(part) for part in rank] for rank in planned] == [[64], [64]]


def test_more_ranks_than_trajectories_leaves_empty_micro_batches_that_still_have_a_forward():
    planned = plan(np.array([5, 7]), 4, 100)
    assert sorted(len(rank[0]) for rank in planned) == [0, 0, 1, 1]
    empty = microbatch(make_batch([2], [3]), np.zeros(0, np.int64))
    assert empty.ids_BL.shape == (1, 1)
    assert len(empty.slots_R) == 0


def test_an_empty_batch_has_no_micro_batches_on_any_rank():
    assert plan(np.zeros(0, np.int64), 3, 100) == [[], [], []]
    with pytest.raises(ValueError, match="num_ranks is 0"):
        plan(np.array([1]), 0, 100)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=20), st.integers(1, 3), st.integers(1, 60)
)
def test_micro_batches_hold_each_response_token_once_after_the_position_that_scores_it(sizes, num_ranks, budget):
    batch = make_batch([p for p, _ in sizes], [r for _, r in sizes])
    flat = [
        (n, t, p, int(batch.ids[start + p + t]))
        for n, (start, (p, r)) in enumerate(zip(np.cumsum([0] + [p + r for p, r in sizes]), sizes, strict=False))
        for t in range(r)
    ]
    seen = []
    for rank in plan(batch.prompt_lengths + batch.response_lengths, num_ranks, budget):
        for part in rank:
            mb = microbatch(batch, part)
            assert mb.ids_BL.shape[1] == max([sum(sizes[i]) for i in part], default=1)
            for row, col, target, slot, n in zip(mb.rows_R, mb.cols_R, mb.targets_R, mb.slots_R, mb.sequence_R, strict=True):
                assert (n, col, target) == (flat[slot][0], flat[slot][2] + flat[slot][1] - 1, flat[slot][3])
                assert mb.ids_BL[row, col + 1] == target
                assert part[row] == n
            seen += mb.slots_R.tolist()
    assert sorted(seen) == list(range(len(flat)))


def test_masked_tokens_inside_an_answer_keep_their_place():
    batch = make_batch([3, 2], [6, 6])
    batch.mask[:] = [1, 1, 0, 0, 1, 1] * 2
    for part in ([0, 1], [1, 0], [1]):
        mb = microbatch(batch, np.array(part))
        for row, n in enumerate(part):
            mine = mb.rows_R == row
            assert batch.mask[mb.slots_R[mine]].tolist() == [True, True, False, False, True, True]
            start = int((batch.prompt_lengths + batch.response_lengths)[:n].sum()) + int(batch.prompt_lengths[n])
            assert mb.targets_R[mine].tolist() == batch.ids[start : start + 6].tolist()


def test_an_answer_without_tokens_is_a_row_that_trains_nothing():
    batch = make_batch([3, 2], [0, 4])
    mb = microbatch(batch, np.array([0, 1]))
    assert mb.ids_BL.shape == (2, 6)
    assert set(mb.rows_R) == {1}


def test_a_trajectory_without_a_prompt_is_refused_by_its_number():
    with pytest.raises(ValueError, match="trajectory 1 has an empty prompt"):
        microbatch(make_batch([3, 0], [2, 4]), np.array([0, 1]))
