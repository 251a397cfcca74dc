"""Every name that a configuration may choose trains for a few steps through the whole system, beside the toy engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from async_rl.config import AlgorithmConfig, load_config, methods, preset_names
from async_rl.config.algorithm import KLConfig
from async_rl.rollout.toy_engine import SCRIPT_VARIABLE

from .runs import QUICKSTART, assert_books_balance, random_model, train
from .test_config_methods import choices

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(240)]

# The toy draws its ids evenly, so its log-probs are far from the policy's: bounds are wide here, or nothing would be left.
SMALL = [
    *("rollout.engine=toy", "model.make=null", "groups_per_step=4", "rollout.num_slots=4", "eval.draws=0", "num_steps=3"),
    *("rollout.max_new_tokens=48", "data.num_items=500"),
    "data.reward=tests.reward_functions:parity",
]
# One line is one run; together they hold every preset, method, mask and option of a kind.
RUNS = [
    "grpo algorithm.masks.icepop.low=0 algorithm.masks.icepop.high=1e6 algorithm.masks.sequence_k3_mean.high=1e6 "
    "algorithm.entropy_coef=0.001 learner.lr_by_ess=true",
    "dr_grpo algorithm.correction=sequence_truncate algorithm.overlong_buffer_tokens=4 algorithm.normalizer=ema",
    "lite_ppo algorithm.aggregation=prompt_mean algorithm.correction=geometric_mask algorithm.correction_options.high=1e6 "
    "algorithm.correction_options.low=0 algorithm.masks.sequence_product.high=1e6",
    "rloo algorithm.aggregation=seq_mean_token_mean algorithm.correction=token_clip algorithm.kl.into=attached_k3 "
    "algorithm.kl.beta=0.01 algorithm.num_minibatches=2",
    "opo algorithm.aggregation=seq_mean_token_sum algorithm.correction=sequence_clip algorithm.kl.beta=0.01",
    "remax algorithm.correction=token_none algorithm.normalizer=debiased_ema algorithm.kl.into=straight_through_k3 "
    "algorithm.kl.beta=0.01",
    "reinforce_pp algorithm.correction=sequence_none algorithm.num_epochs=2 algorithm.aggregation=token_mean",
    "reinforce_pp_baseline algorithm.correction=geometric_none algorithm.proximal=loglinear algorithm.num_minibatches=2",
    "ppo algorithm.correction=geometric_truncate algorithm.kl.into=reward algorithm.kl.beta=0.01 algorithm.critic.popart=0.1 "
    "algorithm.critic.warmup_steps=1",
    "vapo algorithm.overlong=mask",
    "vtrace_ppo algorithm.correction=sequence_mask algorithm.num_minibatches=2 algorithm.num_epochs=2",
    "hybrid algorithm.correction=geometric_clip algorithm.advantage_options.grpo_end=0.3 "
    "algorithm.advantage_options.critic_start=0.3",
    "on_policy_ppo max_staleness=0 group_size_end=4",
    "bypass_ppo algorithm.masks.opsm.delta=0.5 adaptive_group_sizes=[2,16]",
    "cispo algorithm.correction_normalize=true",
    "gspo algorithm.masks.sequence_geomean.low=0 algorithm.masks.sequence_geomean.high=1e6",
    "aipo algorithm.masks.m2po.tau=1e6",
    "topr algorithm.masks.m2po_all.tau=1e6",
    "kimi_k15",
    "kimi_pmd",
    "dppo_tv",
    "sapo",
    "icepop algorithm.correction_options.low=0 algorithm.correction_options.high=1e6",
    "m2po algorithm.masks.m2po.tau=1e6",
    "opsm algorithm.zero_variance=mask",
]


def chosen(line: str) -> list[str]:
    name, *others = line.split()
    return [f"algorithm={name}", *others]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.path={random_model(tmp_path_factory.mktemp('models') / 'random')}"


def test_every_name_is_in_a_run() -> None:
    found = [load_config(QUICKSTART, [*SMALL, *chosen(line)]).algorithm for line in RUNS]
    assert {a.preset for a in found} == set(preset_names())
    for key in ("advantage", "loss", "correction", "normalizer", "proximal", "overlong"):
        assert {getattr(a, key) for a in found} == choices(AlgorithmConfig, key), key
    assert {a.aggregation for a in found} >= choices(AlgorithmConfig, "aggregation")
    assert {a.kl.into for a in found if a.kl.beta} == choices(KLConfig, "into")
    assert {name for a in found for name in a.masks} == methods.MASKS.keys()


@pytest.mark.parametrize("line", RUNS, ids=lambda line: line.split()[0])
def test_it_trains(line: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCRIPT_VARIABLE, '{"median_length": 20, "length_sigma": 0.7}')
    with train(tmp_path, *SMALL, model, *chosen(line)) as run:
        result = run.finish(200)
    steps = run.steps()
    assert [row["version"] for row in steps] == [1, 2, 3]
    for row in steps:
        figures = {name: x for name, x in row.items() if isinstance(x, float)}
        assert all(math.isfinite(x) for x in figures.values()), figures
    assert any(row.get("policy/grad_norm", 0.0) > 0 for row in steps), "no step had anything to learn from"
    has_critic = load_config(QUICKSTART, [*SMALL, *chosen(line)]).algorithm.has_critic
    assert any("value/loss" in row for row in steps) == has_critic
    assert result["ledger"]["balanced"]


def test_books(model: str, tmp_path: Path) -> None:
    """Groups of one more answer, which is not trained on, count like any other."""
    with train(tmp_path, *SMALL, model, "algorithm=remax", "max_staleness=1") as run:
        result = run.finish(200)
    assert_books_balance(result, trained=12)
    assert all(row["batch/num_samples"] == 32 for row in run.steps())
