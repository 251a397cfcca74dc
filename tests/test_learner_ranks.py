"""Two learner ranks (FSDP2 over gloo) do what one does: gradients, figures, refusals and checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from async_rl.learner.checkpoint import Checkpointer

from .learner_cases import distance, gradients_of, make_batch, make_config, make_policy, make_update, weights
from .learner_worker import BATCHES, MODES, NUM_RANKS, no_op

torch.set_num_threads(1)
pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank found, and the folder they worked in."""
    folder = tmp_path_factory.mktemp("ranks")
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.learner_worker"]
    logs = [(folder / f"rank{r}.log").open("w+") for r in range(NUM_RANKS)]
    running = [
        subprocess.Popen([*command, str(r), str(folder)], cwd=ROOT, env=env, stdout=logs[r], stderr=subprocess.STDOUT)
        for r in range(NUM_RANKS)
    ]
    try:
        codes = [process.wait(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    said = "\n".join(Path(log.name).read_text()[-3000:] for log in logs)
    assert codes == [0] * NUM_RANKS, said
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(NUM_RANKS)], folder


CASES = [(name, mode) for name in BATCHES for mode in (MODES if name == "uneven" else MODES[:1])]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_two_ranks_give_the_gradient_and_figures_of_one(ranks, name, mode):
    config = make_config({"aggregation": mode}, {"microbatch_tokens": 48})
    expected, report = gradients_of(config, make_policy(), make_batch(**BATCHES[name]))
    for found in (results[f"{name} {mode}"] for results in ranks[0]):
        assert distance(found["grads"], expected) < 1e-5
        assert found["metrics"] == pytest.approx(report.metrics, rel=1e-4, abs=1e-6)
        assert found["num_tokens"] == report.num_tokens
    assert ranks[0][0][f"{name} {mode}"]["metrics"] == ranks[0][1][f"{name} {mode}"]["metrics"]


def test_untied_embeddings_and_a_hybrid_mesh_give_the_same_gradient(ranks):
    for name, policy in (("untied", make_policy(tie_word_embeddings=False)), ("hybrid", make_policy())):
        expected, _ = gradients_of(make_config(), policy, make_batch(seed=1))
        assert all(distance(results[name]["grads"], expected) < 1e-5 for results in ranks[0])


def test_the_gradient_norm_is_global_and_clipping_brings_it_to_its_bound(ranks):
    expected, report = gradients_of(make_config(), make_policy(), make_batch(seed=1))
    for found in (results["clipped"] for results in ranks[0]):
        assert found["metrics"]["policy/grad_norm"] == pytest.approx(report.metrics["policy/grad_norm"], rel=1e-5)
        norm = sum((g.double() ** 2).sum().item() for g in found["grads"].values()) ** 0.5
        assert norm == pytest.approx(0.1, rel=1e-4)
    assert report.metrics["policy/grad_norm"] > 0.2 and expected


def test_mini_batches_update_as_on_one_rank_with_weights_at_rest_at_every_boundary(ranks):
    policy = make_policy()
    update, _ = make_update(make_config({"num_minibatches": 2}, {"microbatch_tokens": 40}), policy)
    report = update.run(make_batch(seed=1), 0, no_op, no_op)
    for found in (results["mini"] for results in ranks[0]):
        assert found["metrics"]["ppo/first_minibatch_max_abs_log_r"] < 1e-6
        assert found["metrics"] == pytest.approx(report.metrics, rel=1e-3, abs=1e-5)
        assert distance(found["weights"], weights(policy)) < 1e-5
    seen = [results["mini"]["seen"] for results in ranks[0]]
    assert seen[0] == seen[1] and len(seen[0]) >= 4
    assert len(set(seen[0])) == 2  # before and after the first update


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_what_is_not_finite_on_one_rank_is_skipped_on_both_and_changes_nothing(ranks, kind):
    for found in (results[f"poison {kind}"] for results in ranks[0]):
        assert found["skipped"] and found["same"] and found["touched"] == []
        assert found["reason"].startswith("loss is not finite on 1 of 2" if kind == "loss" else "gradient norm is not finite")
    assert ranks[0][0][f"poison {kind}"]["reason"] == ranks[0][1][f"poison {kind}"]["reason"]


def test_a_checkpoint_of_two_ranks_loads_whole_on_one_and_trains_on(ranks):
    policy = make_policy(seed=5)
    update, optimizer = make_update(make_config(), policy)
    checkpointer = Checkpointer(ranks[1] / "checkpoints", keep=2)
    folder = checkpointer.latest_complete()
    assert folder is not None and folder.name == "step_000003"
    assert len(list(folder.glob("*.distcp"))) == NUM_RANKS
    assert checkpointer.load(folder, policy, optimizer) == b"ledger"
    loaded = weights(policy) | optimizer.named_state()
    saved = ranks[0][0]["saved"]
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    assert not update.run(make_batch(seed=3), 3, no_op, no_op).skipped


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ("0 shards", "rank 0: .*No space left"),
        ("1 shards", "rank 1: .*No space left"),
        ("0 manifest", "No space left"),
        ("1 state", "is not finite"),
    ],
)
def test_a_save_that_fails_on_one_rank_fails_alike_on_both(ranks, failure, cause):
    said = [results[f"failed {failure}"] for results in ranks[0]]
    assert said[0] == said[1]
    assert re.search(cause, said[0])
