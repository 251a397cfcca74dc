"""Two and four ranks (FSDP2, HSDP; gloo) train the critic as one does: gradients, figures, its scale, refusals, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.learner.checkpoints.checkpoint import Checkpointer

from .critic_cases import (
    critic_config,
    gradients_of,
    make_critic,
    make_value_update,
    state,
    targets,
    train,
    values_of,
    with_ends,
)
from .critic_worker import MOMENTS, SMALL
from .learner_cases import distance, make_batch
from .learner_worker import BATCHES
from .ranks import Found, run_ranks

torch.set_num_threads(1)
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
WORKER = "tests.critic_worker"


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with the checkpoint of one rank, and what it holds."""
    config, folder = critic_config({"popart": 0.3}), tmp_path_factory.mktemp("one")
    update = make_value_update(config, make_critic())
    update.rescale(MOMENTS)
    train(update, config, make_batch(seed=0), *targets(make_batch(seed=0)))
    Checkpointer(folder / "checkpoints", keep=2).save(1, update.tensors(), b"")
    return folder, state(update)


@pytest.fixture(scope="module")
def two(tmp_path_factory, one) -> Found:
    return run_ranks(WORKER, 2, tmp_path_factory.mktemp("two"), str(one[0]))


@pytest.fixture(scope="module")
def four(tmp_path_factory, two) -> Found:
    return run_ranks(WORKER, 4, tmp_path_factory.mktemp("four"), str(two.folder))


@pytest.fixture(scope="module", params=["two", "four"])
def found(request) -> Found:
    return request.getfixturevalue(request.param)


def assert_equal(held: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    assert held.keys() == saved.keys()
    assert [key for key, value in saved.items() if not torch.equal(held[key], value)] == []


@pytest.mark.parametrize("name", [*BATCHES, "hybrid"])
def test_ranks_give_the_gradient_and_figures_of_one_also_a_rank_without_tokens(found, name):
    config = critic_config(learner=SMALL if name in BATCHES else None)
    expected, figures = gradients_of(config, make_critic(), make_batch(**BATCHES.get(name, {"seed": 1})))
    for results in (rank[name] for rank in found.ranks):
        assert distance(results["grads"], expected) < 1e-5
        assert results["figures"] == pytest.approx(figures, rel=1e-4, abs=1e-6)
        assert results["figures"] == found.ranks[0][name]["figures"]


def test_popart_moves_no_value_on_any_number_of_ranks_and_then_they_learn_as_one(found):
    config, batch = critic_config({"popart": 0.3}, SMALL), with_ends(make_batch(seed=2))
    update = make_value_update(config, make_critic())
    expected = torch.cat(values_of(update, config, batch))
    update.rescale(MOMENTS)
    assert train(update, config, batch, *targets(batch))[0] == ""
    for results in (rank["scale"] for rank in found.ranks):
        torch.testing.assert_close(results["before"], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(results["after"], results["before"], atol=1e-5, rtol=1e-5)
        assert results["reason"] == ""
        assert torch.equal(results["state"]["critic.popart"], state(update)["critic.popart"])
        assert distance(results["state"], state(update)) < 1e-4


def test_in_bf16_the_head_stays_in_fp32(found):
    for results in (rank["half"] for rank in found.ranks):
        assert results["reason"] == ""
        assert results["before"].abs().max() > 0.1
        torch.testing.assert_close(results["after"], results["before"], atol=1e-5, rtol=1e-5)


def test_a_return_that_is_not_finite_on_one_rank_changes_nothing_on_all(found):
    for results in (rank["poison"] for rank in found.ranks):
        assert results["reason"] == f"value/loss is not finite on 1 of {len(found.ranks)} ranks"
        assert results["same"] and results["figures"] == {}


def test_a_checkpoint_loads_bit_for_bit_on_another_number_of_ranks(one, two, four):
    for rank in two.ranks:
        assert_equal(rank["loaded"], one[1])
    for rank in four.ranks:
        assert_equal(rank["loaded"], two.ranks[0]["saved"])


def test_a_checkpoint_of_several_ranks_loads_bit_for_bit_on_one(found):
    config = critic_config({"popart": 0.3})
    update = make_value_update(config, make_critic(seed=5))
    checkpointer = Checkpointer(found.folder / "checkpoints", keep=2)
    folder = checkpointer.latest_complete()
    assert folder is not None
    checkpointer.load(folder, update.tensors())
    assert_equal(state(update), found.ranks[0]["saved"])
    assert train(update, config, make_batch(seed=2), *targets(make_batch(seed=2)), 2)[0] == ""
