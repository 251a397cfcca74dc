"""All aggregations against the golden two ranks, and what the two that need more than lengths ask for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.algorithms import aggregation

from .estimator_cases import bools, cases, close, f64, flat, sequence_of


def flattened(inputs):
    """Every micro-batch as (rank, losses, mask, trajectory in the whole batch), with the prompts and tokens of the batch."""
    prompts, counts, parts = [], [], []
    for r, rank in enumerate(inputs["ranks"]):
        for micro in rank:
            sequence = sequence_of([values for values, _, _ in micro]) + len(prompts)
            parts.append((r, f64(flat(v for v, _, _ in micro)), bools(flat(m for _, m, _ in micro)), sequence))
            prompts += [int(prompt[1:]) for _, _, prompt in micro]
            counts += [sum(m) for _, m, _ in micro]
    return parts, torch.tensor(prompts), torch.tensor(counts)


@cases("loss_aggregation")
@pytest.mark.parametrize("mode", aggregation.AGGREGATIONS)
def test_micro_batches_on_ranks_add_up_to_the_global_loss(inputs, expected, tol, mode):
    parts, prompts, counts = flattened(inputs)
    ranks, options = len(inputs["ranks"]), {"group_ids_N": prompts, "max_tokens": inputs["Lmax"]}
    total = aggregation.denominator(mode, counts, group_ids_N=prompts)
    backward_losses: list[list[float]] = [[] for _ in range(ranks)]
    for r, losses, mask, sequence in parts:
        scale = aggregation.token_scales(mode, mask, sequence, counts, **options)
        backward_losses[r].append(float(aggregation.contribution(losses, scale, mask, ranks, total)))
    close(np.mean([sum(rank) for rank in backward_losses]), expected[mode], tol)  # FSDP averages over ranks
    if mode == "token_mean":
        assert total == expected["global_tokens"]
        for got, want in zip(backward_losses, expected["token_mean_backward_losses"], strict=True):
            close(got, want, tol)
    elif mode != "prompt_mean":
        assert total == expected["global_seqs"]


@cases("seed_mean_bug_demo")
def test_the_loss_is_over_trainable_tokens_not_over_the_padded_table(inputs, expected, tol):
    losses, mask, sequence = f64(flat(inputs["loss"])), bools(flat(inputs["mask"])), sequence_of(inputs["mask"])
    counts = aggregation.num_tokens_per_sequence(mask, sequence, 2)
    scale = aggregation.token_scales("token_mean", mask, sequence, counts)
    total = aggregation.denominator("token_mean", counts)
    close(aggregation.contribution(losses, scale, mask, 1, total), expected["masked_mean"], tol)
    close(torch.where(mask, losses, 0).mean(), expected["seed_torch_mean"], tol)


token = st.tuples(st.floats(-3, 3), st.booleans())
answers = st.lists(st.tuples(st.lists(token, max_size=5), st.integers(0, 2)), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(answers)
def test_prompts_and_constant_lengths_equal_their_plain_loops(table):
    rows, prompts = [row for row, _ in table], [prompt for _, prompt in table]
    losses, mask = f64([x for x, _ in flat(rows)]), bools([m for _, m in flat(rows)])
    counts = aggregation.num_tokens_per_sequence(mask, sequence_of(rows), len(rows))
    by_prompt = {p: [x for row, q in table if q == p for x, m in row if m] for p in prompts}
    kept = [np.mean(x) for x in by_prompt.values() if x]
    want = {
        "prompt_mean": np.mean(kept) if kept else 0.0,
        "seq_mean_token_sum_norm": sum(map(sum, by_prompt.values())) / (9 * max(1, int((counts > 0).sum()))),
    }
    for mode, value in want.items():
        n = aggregation.denominator(mode, counts, group_ids_N=torch.tensor(prompts))
        options = {"group_ids_N": torch.tensor(prompts), "max_tokens": 9}
        scale = aggregation.token_scales(mode, mask, sequence_of(rows), counts, **options)
        got = float(aggregation.contribution(losses, scale, mask, 1, n)) if n else 0.0
        assert got == pytest.approx(value, abs=1e-9)
        assert bool(n) == bool(kept)


def test_what_a_mode_needs_is_asked_for_by_name():
    one, mask, sequence = torch.tensor([1]), bools([1]), torch.tensor([0])
    for mode, what in (("prompt_mean", "give group_ids_N"), ("seq_mean_token_sum_norm", "max_tokens is None")):
        with pytest.raises(ValueError, match=what):
            aggregation.token_scales(mode, mask, sequence, one)
    with pytest.raises(ValueError, match="give group_ids_N"):
        aggregation.denominator("prompt_mean", one)
    with pytest.raises(ValueError, match="group_ids has shape"):
        aggregation.denominator("prompt_mean", one, group_ids_N=torch.tensor([0, 1]))
