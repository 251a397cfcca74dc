"""The critic on one rank: what it values, how it learns, the scale of its targets, and models it must refuse."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from async_rl.algorithms.diagnostics import with_explained_variance
from async_rl.algorithms.schedules import lr_at
from async_rl.algorithms.whitening import moments
from async_rl.config import ConfigError
from async_rl.learner import LearnerError
from async_rl.learner.update.critic import load_critic
from async_rl.learner.update.model import hf_named_parameters, make_mesh
from async_rl.learner.update.value_update import make_value_update as made
from async_rl.learner.update.value_update import trains_critic

from .critic_cases import (
    critic_config,
    dealt,
    first_token_task,
    gradients_of,
    make_critic,
    make_value_update,
    naive_gradients,
    naive_values,
    state,
    targets,
    train,
    values_of,
    with_ends,
)
from .learner_cases import CPU, VOCAB, distance, make_batch, make_config, make_policy, rows

torch.set_num_threads(1)


def start(critic: dict[str, Any] | None = None, fresh: bool = False):
    config = critic_config(critic)
    return config, make_value_update(config, make_critic(fresh=fresh))


@pytest.fixture
def alone():
    """A process group of this process."""
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [key for key in a if not torch.equal(a[key], b[key])] == []


# What it values.


def test_every_value_is_0_before_the_first_update():
    config, update = start(fresh=True)
    values_R, ends_N = values_of(update, config, with_ends(make_batch()))
    assert not values_R.any() and not ends_N.any()


def test_values_are_those_of_the_states_before_each_token_and_after_a_cut_answer():
    config, update = start()
    batch = with_ends(make_batch(masked_share=0.3))
    values_R, ends_N = values_of(update, config, batch)
    expected_R, expected_N = naive_values(update.critic, batch)
    mask_R, cut_N = torch.from_numpy(batch.mask), torch.from_numpy(batch.truncated)
    scored_N = torch.tensor([bool(batch.mask[at].any()) for _, _, at in rows(batch)])
    assert (cut_N & scored_N).sum() >= 4
    torch.testing.assert_close(values_R[mask_R], expected_R[mask_R], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ends_N[cut_N & scored_N], expected_N[cut_N & scored_N], atol=1e-5, rtol=1e-5)
    assert not ends_N[~cut_N].any()
    assert values_R.dtype == ends_N.dtype == torch.float32


def test_a_value_sees_the_tokens_before_its_own_and_no_other():
    config, update = start()
    batch = dataclasses.replace(make_batch(num_groups=1, group_size=1, masked_share=0.0), truncated=np.array([True]))
    before_R, before_N = values_of(update, config, batch)
    prompt = int(batch.prompt_lengths[0])
    for t in range(len(batch.mask)):
        ids = batch.ids.copy()
        ids[prompt + t] = ids[prompt + t] % (VOCAB - 1) + 1
        after_R, after_N = values_of(update, config, dataclasses.replace(batch, ids=ids))
        moved_R = (after_R - before_R).abs()
        assert moved_R[: t + 1].max() < 1e-6, "token t is the action, not the state"
        assert (moved_R[t + 1 :] > 1e-5).all()
        assert (after_N - before_N).abs() > 1e-5


def test_two_passes_of_a_model_with_dropout_agree():
    config = critic_config()
    update = make_value_update(config, make_critic(attention_dropout=0.5))
    assert torch.equal(values_of(update, config, make_batch())[0], values_of(update, config, make_batch())[0])


def test_weights_that_are_loaded_after_a_pass_count_in_the_next(alone):
    config, batch = critic_config(), make_batch()
    mesh = make_mesh(config.learner, CPU)
    update, other = (make_value_update(config, make_critic(mesh, seed)) for seed in (0, 1))
    first, expected = values_of(update, config, batch)[0], values_of(other, config, batch)[0]
    for key, tensor in other.tensors().items():
        update.tensors()[key].copy_(tensor)
    assert not torch.allclose(first, expected)
    assert torch.equal(values_of(update, config, batch)[0], expected)


# How it learns.


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_gradient_is_that_of_the_mean_over_tokens_whatever_the_micro_batches(clip):
    batch = make_batch(seed=3)
    expected = naive_gradients(make_critic(), batch, clip)
    seen = []
    for budget in (24, 60, 10_000):
        config = critic_config({"clip": clip}, {"microbatch_tokens": budget})
        got, figures = gradients_of(config, make_critic(), batch)
        assert distance(got, expected) < 1e-5
        seen.append((len(dealt(config, batch)[0]), figures))
    assert seen[0][0] > seen[1][0] > seen[2][0] == 1
    for _, figures in seen[:-1]:
        assert figures == pytest.approx(seen[-1][1], rel=1e-4, abs=1e-6)
    assert 0.1 < figures["value/vf_clipfrac"] < 0.9 if clip else figures["value/vf_clipfrac"] == 0


def test_what_stands_at_masked_tokens_does_not_matter_not_even_nan():
    config, batch = critic_config(), make_batch(seed=4, masked_share=0.3)
    mask_R = torch.from_numpy(batch.mask)
    results = []
    for garbage in (0.0, torch.nan):
        update = make_value_update(config, make_critic())
        old_R, returns_R = (x.where(mask_R, garbage) for x in targets(batch))
        assert train(update, config, batch, old_R, returns_R)[0] == ""
        results.append(state(update))
    assert_same(*results)


def test_it_learns_a_constant():
    config, update = start({"lr": 1e-2, "clip": None}, fresh=True)
    batch = make_batch()
    returns_R = torch.full((len(batch.mask),), 0.7)
    for step in range(20):
        train(update, config, batch, torch.zeros_like(returns_R), returns_R, step)
    values_R = values_of(update, config, batch)[0][torch.from_numpy(batch.mask)]
    assert values_R.mean() == pytest.approx(0.7, abs=0.1)
    assert values_R.std() < 0.2


def test_it_learns_which_states_are_worth_more():
    config = critic_config({"lr": 3e-3, "clip": None}, num_steps=40)
    update = make_value_update(config, make_critic(fresh=True))
    batch, returns_R = first_token_task(0)
    explained = []
    for step in range(40):
        _, figures = train(update, config, batch, torch.zeros_like(returns_R), returns_R, step)
        explained.append(with_explained_variance(figures)["value/explained_var"])
    assert explained[0] == pytest.approx(0, abs=1e-6)
    assert explained[-1] > 0.8


def test_a_value_that_has_moved_by_more_than_the_clip_learns_no_more():
    batch = make_batch(masked_share=0.0)
    far_R = torch.zeros(len(batch.mask))  # every value is near 5, so beyond the clip on the way to the return
    for clip, moves in ((0.5, False), (None, True)):
        config, update = start({"clip": clip})
        with torch.no_grad():
            update.critic.head.weight.zero_()
            update.critic.head.bias.fill_(5.0)
        before = state(update)
        _, figures = train(update, config, batch, far_R, far_R + 10)
        assert figures["value/vf_clipfrac"] == (0.0 if moves else 1.0)
        assert (figures["value/grad_norm"] > 0) == moves
        assert torch.equal(before["critic.head.bias"], state(update)["critic.head.bias"]) != moves


def test_its_rate_is_its_own_under_the_policys_schedule():
    config, update = start({"lr": 2e-3})
    batch = make_batch()
    for step in (0, 7, 19):
        c = config.learner
        expected = lr_at(step, 20, 2e-3, c.warmup_fraction, c.hold_fraction, c.min_lr_ratio)
        assert train(update, config, batch, *targets(batch), step)[1]["value/lr"] == expected


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_return_that_is_not_finite_changes_nothing_and_says_why(bad):
    config, update = start({"popart": 0.1})
    batch = make_batch(masked_share=0.0)
    old_R, returns_R = targets(batch)
    train(update, config, batch, old_R, returns_R)
    before = state(update)
    returns_R[5] = bad
    update.rescale(moments(returns_R, torch.from_numpy(batch.mask)))
    reason, figures = train(update, config, batch, old_R, returns_R, 1)
    assert reason == "value/loss is not finite on 1 of 1 ranks" and figures == {}
    assert_same(state(update), before)
    assert all(p.grad is None for p in update.critic.parameters())
    assert train(update, config, batch, *targets(batch), 1)[0] == ""


def test_a_gradient_that_is_not_finite_changes_nothing_either():
    config, update = start()
    batch = make_batch()
    before = state(update)
    update.critic.hf.get_submodule("norm").register_full_backward_hook(lambda m, i, o: (i[0] * torch.nan,))
    assert train(update, config, batch, *targets(batch))[0] == "value/grad_norm is not finite on 1 of 1 ranks"
    assert_same(state(update), before)


def test_without_a_trainable_token_nothing_is_done():
    config, update = start()
    batch = make_batch()
    before = state(update)
    batch = dataclasses.replace(batch, mask=np.zeros_like(batch.mask))
    assert train(update, config, batch, *targets(batch)) == ("no trainable token", {})
    assert_same(state(update), before)


# The scale of its targets.


@pytest.mark.parametrize("sharded", [False, True])
def test_popart_moves_the_scale_and_no_value(sharded, alone):
    config = critic_config({"popart": 0.2})
    update = make_value_update(config, make_critic(make_mesh(config.learner, CPU) if sharded else None))
    batch = with_ends(make_batch())
    before = values_of(update, config, batch)
    update.rescale(torch.tensor([2.0, 2.0, 8.0]))  # mean 1, mean square 4
    assert update.popart == pytest.approx((0.2, 1.6))
    update.rescale(torch.tensor([3.0, 90.0, 3000.0]))
    assert update.popart.mu == pytest.approx(0.8 * 0.2 + 0.2 * 30)
    for value, earlier in zip(values_of(update, config, batch), before, strict=True):
        torch.testing.assert_close(value, earlier, atol=1e-5, rtol=1e-5)


def test_popart_learns_on_the_new_scale_with_the_clip_in_units_of_the_return():
    batch = make_batch(masked_share=0.0)
    old_R, returns_R = targets(batch)
    plain_config, plain = start({"clip": 0.3})
    _, expected = train(plain, plain_config, batch, old_R, returns_R)
    config, update = start({"clip": 0.3, "popart": 0.5})
    update.rescale(torch.tensor([1.0, 4.0, 200.0]))
    sigma = update.popart.sigma
    _, figures = train(update, config, batch, old_R, returns_R)
    assert sigma > 5
    assert figures["value/vf_clipfrac"] == expected["value/vf_clipfrac"] > 0
    assert figures["value/residual_sq_mean"] == pytest.approx(expected["value/residual_sq_mean"], rel=1e-4)
    assert figures["value/loss"] * sigma**2 == pytest.approx(expected["value/loss"], rel=1e-4)


def test_popart_off_leaves_the_scale_that_a_checkpoint_brought():
    config, update = start()
    update.tensors()["critic.popart"].copy_(torch.tensor([2.0, 13.0]))
    values_R, _ = values_of(update, config, make_batch())
    update.rescale(torch.tensor([1.0, 50.0, 2500.0]))
    assert update.popart == (2.0, 13.0) and update.popart.sigma == 3.0
    assert torch.equal(values_of(update, config, make_batch())[0], values_R)


# Where it comes from, and when.


def saved(hf: PreTrainedModel, folder: Path) -> str:
    hf.save_pretrained(folder)
    return str(folder)


def settings(policy: str, critic: str | None = None):
    return critic_config({"path": critic, "lr": 2e-3}, model={"path": policy, "max_model_len": 24})


@pytest.mark.parametrize("tied", [True, False])
def test_it_starts_from_the_policys_model_without_its_output_layer(tmp_path, tied):
    hf = make_policy(tie_word_embeddings=tied).hf
    critic = load_critic(settings(saved(hf.bfloat16(), tmp_path)), CPU, None)
    named = dict(hf_named_parameters(critic))
    assert {p.dtype for p in named.values()} == {torch.float32}
    assert set(named) == {name for name, _ in hf.get_decoder().named_parameters()} | {"head.weight", "head.bias"}
    assert all(torch.equal(p.float(), named[name]) for name, p in hf.get_decoder().named_parameters())
    assert not named["head.weight"].any() and not named["head.bias"].any()


def test_a_model_of_its_own_may_have_another_architecture(tmp_path):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    other = saved(GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=1, **sizes)), tmp_path / "critic")
    config = settings(saved(make_policy().hf, tmp_path / "policy"), other)
    update = made(config, CPU, None, None)
    assert update.critic.head.in_features == 32
    assert (update.optimizer.lr, update.optimizer.total_steps) == (2e-3, 20)
    assert train(update, config, make_batch(), *targets(make_batch()))[0] == ""


REFUSED = {
    "no model": r"algorithm\.critic\.path is .*, where there is no config\.json: give the folder",
    "vocabulary": r"algorithm\.critic\.path is .*, which knows 99 tokens, but the policy at model\.path has 100: give",
    "positions": r"model\.max_model_len is 24, but .* \(algorithm\.critic\.path\) knows 8 positions: lower it",
    "missing tensor": r"algorithm\.critic\.path is .*, whose files lack 1 of the tensors .* model\.norm\.weight first",
    "unreadable": r"algorithm\.critic\.path is .*, which cannot be loaded",
}


def bad_critic(kind: str, folder: Path) -> None:
    odd: dict[str, Any] = {"vocabulary": {"vocab_size": VOCAB - 1}, "positions": {"max_position_embeddings": 8}}.get(kind, {})
    hf = make_policy(**odd).hf
    held: dict[str, Any] = {}
    if kind == "missing tensor":
        held["state_dict"] = {name: tensor for name, tensor in hf.state_dict().items() if name != "model.norm.weight"}
    if kind != "no model":
        hf.save_pretrained(folder, **held)
    if kind == "unreadable":
        (folder / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_be_a_critic_is_refused_by_its_key(tmp_path, kind):
    bad_critic(kind, tmp_path / "critic")
    config = settings(saved(make_policy().hf, tmp_path / "policy"), str(tmp_path / "critic"))
    with pytest.raises((LearnerError, ConfigError), match=REFUSED[kind]):
        load_critic(config, CPU, None)


@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        ({"advantage": "grpo"}, []),
        ({"advantage": "gae"}, [0, 1, 5, 19]),
        ({"advantage": "hybrid"}, [0, 1, 5, 19]),
        ({"advantage": "hybrid", "advantage_options": {"critic_start": 0.25, "grpo_end": 0.5}}, [5, 19]),
    ],
)
def test_it_is_trained_in_every_step_or_none_but_with_hybrid_from_its_start(algorithm, steps):
    config = make_config(algorithm)
    assert [step for step in (0, 1, 5, 19) if trains_critic(config, step)] == steps
