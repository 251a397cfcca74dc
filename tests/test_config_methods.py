"""Presets, options of methods, and what cannot be right together: refused before anything loads, with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from async_rl.algorithms import advantages, aggregation, corrections, kl, losses, masks, normalizers
from async_rl.config import Config, ConfigError, load_config, methods, parse_config, preset, preset_names
from async_rl.config.algorithm import AlgorithmConfig, KLConfig
from async_rl.config.load import METHOD_KEYS

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SMALL = {"num_steps": 8, "groups_per_step": 4, "group_size": 4, "model": {"path": "somewhere"}}
KIMI = ("algorithm.correction=none", "algorithm.advantage=dr_grpo")
HYBRID = {"advantage": "hybrid"}
BY_TOKEN = {"gae", "vtrace", "hybrid", "reinforce_pp"}  # they are made by the learner's estimator, of several functions


def hybrid(**options: Any) -> dict[str, Any]:
    return {**HYBRID, "advantage_options": options}


def choices(section, key: str) -> set[str]:
    """The names a field may have."""

    def names(annotation):
        for x in getattr(annotation, "__args__", ()):
            yield from [x] if isinstance(x, str) else names(x)

    return set(names(section.model_fields[key].annotation))


@pytest.mark.parametrize(
    ("section", "key", "registry", "options"),
    [
        (AlgorithmConfig, "advantage", advantages.ADVANTAGES.keys() | BY_TOKEN, methods.ADVANTAGES),
        (AlgorithmConfig, "loss", losses.LOSSES, methods.LOSSES),
        (AlgorithmConfig, "correction", corrections.CORRECTIONS, methods.CORRECTIONS),
        (AlgorithmConfig, "normalizer", normalizers.NORMALIZERS.keys() | {"none"}, methods.NORMALIZERS),
        (AlgorithmConfig, "aggregation", aggregation.AGGREGATIONS, None),
        (KLConfig, "into", kl.KL_LOSSES.keys() | {"reward"}, None),
    ],
)
def test_what_may_be_chosen_is_what_the_registry_holds(section, key, registry, options):
    assert choices(section, key) == set(registry)
    assert options is None or options.keys() == set(registry)


def test_every_mask_of_the_registry_has_options():
    assert methods.MASKS.keys() == masks.MASKS.keys()


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_configuration_of_the_quickstart(name):
    extra = ["max_staleness=0"] if name == "on_policy_ppo" else []
    config = load_config(QUICKSTART, [f"algorithm={name}", *extra])
    assert config.algorithm.preset == name
    for key, value in preset(name)["algorithm"].items():
        got = getattr(config.algorithm, key)
        if key == "masks":
            assert got.keys() == value.keys()
        else:
            assert got.items() >= value.items() if isinstance(value, dict) else got == value
    assert parse_config(config.model_dump(mode="json")) == config, "what a run writes down is what it reads back"


def test_a_preset_of_the_command_line_replaces_that_of_the_file_and_keys_beside_it_win(tmp_path):
    file = tmp_path / "own.yaml"
    head = "num_steps: 8\ngroups_per_step: 4\ngroup_size: 4\nmodel: {path: x}\n"
    file.write_text(head + "algorithm: {preset: ppo, advantage_options: {lam_policy: 0.5}, entropy_coef: 0.01}\n")
    assert load_config(file).algorithm.advantage_options["lam_policy"] == 0.5
    other = load_config(file, ["algorithm=gspo", "algorithm.loss_options.eps_high=0.1"]).algorithm
    assert (other.advantage, other.loss, other.entropy_coef) == ("grpo", "gspo", 0.01)
    assert (other.loss_options["eps_low"], other.loss_options["eps_high"]) == (3e-4, 0.1)
    file.write_text(head + "algorithm: ppo\n")
    assert load_config(file).algorithm.advantage == "gae"


def algorithm_from(folder: Path, section: str, *overrides: str) -> AlgorithmConfig:
    """What a file with this section and the overrides make together."""
    file = folder / "own.yaml"
    file.write_text(f"num_steps: 8\ngroups_per_step: 4\ngroup_size: 4\nmodel: {{path: x}}\nalgorithm: {section}\n")
    return load_config(file, overrides).algorithm


def test_a_mapping_given_whole_replaces_what_stood_there_and_dotted_keys_add(tmp_path):
    def masks(section: str, *overrides: str) -> list[str]:
        return sorted(algorithm_from(tmp_path, section, *overrides).masks)

    assert masks("{}", "algorithm.masks={}") == masks("{preset: m2po}", "algorithm.masks={}") == []
    assert masks("{masks: {opsm: {}}}", "algorithm.masks={icepop: {}}") == ["icepop"]
    assert masks("{}", "algorithm=opsm", "algorithm.masks={icepop: {}}", "algorithm.masks.veto.threshold=0.1") == [
        "icepop",
        "veto",
    ]
    assert masks("{masks: {opsm: {}}}", "algorithm.masks.icepop.low=0.1") == ["icepop", "opsm"]
    assert masks("{preset: opsm, masks: {icepop: {}}}") == ["icepop"]
    assert masks("{preset: opsm, masks: {}}") == []
    assert masks("{preset: opsm}", "algorithm.masks.icepop.low=0.1", "algorithm.masks={}") == []
    cautious = "{preset: ppo, advantage_options: {gamma: 0.5}}"
    assert algorithm_from(tmp_path, cautious).advantage_options["lam_policy"] == 0.95
    bare = algorithm_from(tmp_path, cautious, "algorithm.advantage_options={}").advantage_options
    assert (bare["gamma"], bare["lam_policy"]) == (1.0, "adaptive")
    high = algorithm_from(tmp_path, "{correction_options: {high: 9.0}}", "algorithm.correction_options={}").correction_options
    assert high == {"high": 2.0}
    kl = algorithm_from(tmp_path, "{entropy_coef: 0.1, kl: {beta: 0.1, cap: 3.0}}", "algorithm.kl={beta: 0.2}")
    assert (kl.kl.beta, kl.kl.cap, kl.entropy_coef) == (0.2, 2.0, 0.1)
    other = algorithm_from(tmp_path, "{preset: m2po, entropy_coef: 0.1}", "algorithm={preset: ppo}")
    assert (other.advantage, other.entropy_coef) == ("gae", 0.0)


@pytest.mark.parametrize(
    ("section", "overrides", "kind", "options"),
    [
        ("{}", ["algorithm=icepop", "algorithm.correction=token_truncate"], "correction", {"high": 2.0}),
        ("{}", ["algorithm=icepop", "algorithm.correction=token_mask"], "correction", {"low": 0.5, "high": 5.0}),
        ("{preset: icepop, correction: token_truncate}", [], "correction", {"high": 2.0}),
        ("{preset: hybrid, advantage: grpo}", [], "advantage", {"ddof": 1}),
        ("{correction_options: {high: 9.0}}", ["algorithm.correction=sequence_truncate"], "correction", {"high": 2.0}),
        ("{correction_options: {high: 9.0}}", ["algorithm.correction=token_truncate"], "correction", {"high": 9.0}),
        ("{correction_options: {high: 9.0}}", ["algorithm.entropy_coef=0.1"], "correction", {"high": 9.0}),
        ("{loss: gspo, loss_options: {eps_low: 0.1}}", ["algorithm.loss=kimi_k15", *KIMI], "loss", {"tau": 0.1}),
        ("{loss: gspo, loss_options: {eps_low: 0.1}}", ["algorithm.loss=gspo"], "loss", {"eps_low": 0.1, "eps_high": 4e-4}),
        ("{advantage: rloo, normalizer: ema, normalizer_options: {clip: 1}}", ["algorithm.normalizer=none"], "normalizer", {}),
    ],
)
def test_options_go_with_the_method_that_a_later_layer_replaces(tmp_path, section, overrides, kind, options):
    assert getattr(algorithm_from(tmp_path, section, *overrides), f"{kind}_options") == options


def test_another_advantage_than_the_one_of_the_preset_has_options_of_its_own():
    a = load_config(QUICKSTART, ["algorithm=ppo", "algorithm.advantage=vtrace"]).algorithm
    assert "lam_policy" not in a.advantage_options and a.advantage_options["rho_bar"] == 1.05


@pytest.mark.parametrize("override", ["algorithm=[ppo]", "algorithm.critic=[]", "algorithm.kl=3", "learner=[1]"])
def test_what_stands_in_place_of_a_section_is_named_in_plain_words(override):
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [override])
    key = override.partition("=")[0]
    assert re.match(rf"'{key}' is .*, but it is a section: set a key of it", str(caught.value))


def test_the_keys_of_methods_are_keys():
    assert AlgorithmConfig.model_fields.keys() >= METHOD_KEYS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 1}, ["group_size is 1", "compares siblings"]),
        ({"algorithm": {"loss": "bypass_ppo"}}, ["algorithm.correction", "twice"]),
        ({"algorithm": {"loss": "aipo"}}, ["algorithm.correction", "twice"]),
        ({"algorithm": {"loss": "ppo"}}, ["algorithm.correction", "takes no weight"]),
        ({"algorithm": {"loss": "ppo", "correction": "none"}}, ["max_staleness is 2", "i_know=true"]),
        ({"algorithm": {"correction": "none"}}, ["max_staleness is 2", "i_know=true"]),
        ({"algorithm": {"advantage": "vtrace", "advantage_options": {"weighted": True}}}, ["weighted", "twice"]),
        ({"algorithm": {"advantage": "vtrace", "advantage_options": {"c_bar": 2.0}}}, ["c_bar", "rho_bar"]),
        ({"algorithm": {"loss_options": {"dual_clip": 1.0}}}, ["loss_options.dual_clip is 1.0", "greater than 1"]),
        ({"algorithm": {"loss_options": {"tau": 1.0}}}, ["loss_options holds 'tau'", "eps_low, eps_high, dual_clip"]),
        ({"algorithm": {"masks": {"ice": {}}}}, ["algorithm.masks names 'ice'", "icepop"]),
        ({"algorithm": {"masks": {"icepop": {"hi": 1}}}}, ["algorithm.masks.icepop holds 'hi'", "low, high"]),
        ({"algorithm": {"advantage_options": 3}}, ["advantage_options is 3"]),
        ({"rollout": {"top_p": 0.9}}, ["rollout.top_p", "not offered"]),
        ({"rollout": {"min_p": 0.1}}, ["rollout.min_p", "not offered"]),
        ({"rollout": {"repetition_penalty": 1.1}}, ["rollout.repetition_penalty", "not offered"]),
        ({"algorithm": {"loss": "topr", "correction": "none", "advantage": "gae"}}, ["algorithm.loss=topr", "dr_grpo"]),
        ({"algorithm": {"normalizer": "ema"}}, ["algorithm.normalizer", "undoes"]),
        ({"algorithm": {"advantage": "gae", "zero_variance": "refill"}}, ["algorithm.zero_variance", "signal"]),
        ({"algorithm": {"advantage": "gae", "critic": {"warmup_steps": 8}}}, ["critic.warmup_steps is 8", "num_steps=8"]),
        ({"algorithm": {"advantage": "hybrid", "advantage_options": {"grpo_end": 0.8}}}, ["grpo_end", "ppo_start"]),
        ({"algorithm": {"advantage": "hybrid", "advantage_options": {"critic_start": 0.5}}}, ["critic_start", "grpo_end"]),
        ({"algorithm": {"kl": {"into": "reward", "beta": 0.1}}}, ["algorithm.kl.into", "one reward per answer"]),
        ({"algorithm": {"kl": {"target": 1.0}}}, ["algorithm.kl.target", "beta is 0"]),
        ({"algorithm": {"kl": {"gate": 10, "gate_action": "double_beta"}}}, ["gate_action is double_beta", "beta is 0"]),
        (
            {"algorithm": {"kl": {"gate": 1, "gate_action": "roll_back"}}, "checkpoint": {"every": 0}},
            ["roll_back", "checkpoint.every"],
        ),
        ({"algorithm": {"proximal": "loglinear"}}, ["algorithm.proximal", "for nothing"]),
        (
            {"algorithm": {"proximal": "loglinear", "num_minibatches": 2, "correction_normalize": True}},
            ["algorithm.proximal", "recompute"],
        ),
        ({"algorithm": {"correction": "none", "correction_normalize": True}, "max_staleness": 0}, ["correction_normalize"]),
        ({"algorithm": {"overlong_buffer_tokens": 999}}, ["overlong_buffer_tokens is 999", "max_new_tokens"]),
        ({"group_size_end": 6}, ["group_size_end is 6", "power of two"]),
        ({"group_size_end": 32}, ["group_size_end is 32", "16 answers"]),
        ({"adaptive_group_sizes": [5, 8]}, ["adaptive_group_sizes", "group_size=4"]),
        ({"adaptive_group_sizes": [2, 8], "group_size_end": 8}, ["adaptive_group_sizes", "group_size_end"]),
        ({"group_size": 1, "group_size_end": 4, "algorithm": {"advantage": "gae"}}, ["group_size is 1", "2 or more"]),
        ({"group_size": 4, "group_size_end": 1, "algorithm": {"advantage": "gae"}}, ["group_size_end is 1", "2 or more"]),
        ({"group_size_end": 1}, ["group_size_end is 1", "compares siblings"]),
        ({"adaptive_group_sizes": [1, 16]}, ["smallest of adaptive_group_sizes is 1", "compares siblings"]),
        ({"adaptive_group_sizes": [-1, 16]}, ["adaptive_group_sizes.0", "is -1"]),
        ({"algorithm": HYBRID | {"zero_variance": "refill"}}, ["zero_variance is refill", "hybrid"]),
        ({"algorithm": HYBRID | {"zero_variance": "mask"}}, ["zero_variance is mask", "hybrid"]),
        (
            {"num_steps": 3, "algorithm": hybrid(critic_start=0.9, grpo_end=0.95, ppo_start=1.0)},
            ["critic_start is 0.9", "num_steps=3"],
        ),
        ({"algorithm": hybrid(clip_start=1.0)}, ["clip_start is 1.0", "eps_low"]),
        ({"algorithm": hybrid(clip_end=0.05)}, ["clip_end=0.05", "eps_low"]),
        ({"algorithm": hybrid(clip_start=1e9) | {"loss": "gspo"}}, ["clip_start is 1000000000.0", "ten times"]),
        ({"algorithm": hybrid(clip_start=1e-9)}, ["clip_start is 1e-09", "a tenth"]),
        ({"algorithm": hybrid(clip_start=0.25) | {"loss": "cispo"}}, ["clip_start is 0.25", "no effect", "loss=cispo"]),
        (
            {"algorithm": hybrid(clip_end=0.25) | {"loss": "sapo", "correction": "none"}},
            ["clip_end is 0.25", "no effect", "loss=sapo"],
        ),
        (
            {"algorithm": hybrid(critic_start=0.25, grpo_end=0.5) | {"critic": {"warmup_steps": 2}}},
            ["warmup_steps is 2", "step 2"],
        ),
        ({"algorithm": hybrid(lam_policy=0.9, alpha=0.1)}, ["advantage_options.alpha is 0.1", "lam_policy=0.9"]),
        (
            {"algorithm": {"advantage": "gae", "advantage_options": {"lam_policy": 1.0, "alpha": 0.1}}},
            ["advantage_options.alpha is 0.1", "lam_policy=1.0"],
        ),
        ({"algorithm": {"kl": {"into": "attached_k3"}}}, ["kl.into is attached_k3", "beta"]),
        ({"algorithm": {"kl": {"cap": 3.0}}}, ["kl.cap is 3.0", "beta"]),
        ({"algorithm": {"kl": {"beta": 0.1, "into": "attached_k3", "cap": 3.0}}}, ["kl.cap is 3.0", "attached_k3"]),
        (
            {"algorithm": {"advantage": "gae", "kl": {"beta": 0.1, "into": "reward", "cap": 3.0}}},
            ["kl.cap is 3.0", "into=reward"],
        ),
        ({"algorithm": {"kl": {"beta": 0.1, "horizon": 99}}}, ["kl.horizon is 99", "target"]),
        ({"algorithm": {"kl": {"gate_action": "halve_lr"}}}, ["kl.gate_action is halve_lr", "kl.gate is not set"]),
        ({"algorithm": {"kl": {"gate_patience": 9}}}, ["kl.gate_patience is 9", "kl.gate is not set"]),
        ({"algorithm": {"kl": {"gate_resume_ratio": 0.9}}}, ["kl.gate_resume_ratio is 0.9", "kl.gate is not set"]),
        ({"algorithm": {"kl": {"gate_timeout_s": 9.0}}}, ["kl.gate_timeout_s is 9.0", "kl.gate is not set"]),
        (
            {"algorithm": {"kl": {"gate": 1.0, "gate_action": "halve_lr", "gate_timeout_s": 9.0}}},
            ["kl.gate_timeout_s is 9.0", "waits for nobody"],
        ),
        ({"algorithm": {"kl": {"beta": 0.1, "target": 1.0, "horizon": 3}}}, ["kl.horizon is 3", "16 answers", "use 4 or more"]),
        (
            {"adaptive_group_sizes": [2, 8], "algorithm": {"kl": {"beta": 0.1, "target": 1.0, "horizon": 6}}},
            ["kl.horizon is 6", "use 7 or more"],
        ),
    ],
)
def test_methods_that_cannot_be_right_are_one_sentence(changes, words):
    with pytest.raises(ConfigError) as caught:
        parse_config({**SMALL, **changes})
    sentence = str(caught.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence and len(sentence) < 400


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        *[("correction", name, {"low": 9.0, "high": 10.0}) for name in ("token_clip", "token_mask", "sequence_clip")],
        *[("correction", name, {"low": 9.0, "high": 10.0}) for name in ("sequence_mask", "geometric_clip", "geometric_mask")],
        *[("correction", name, {"high": 1e-300}) for name in ("token_truncate", "sequence_truncate", "geometric_truncate")],
        *[("correction", name, {"low": 0.9, "high": 0.1}) for name in ("token_clip", "token_mask", "geometric_mask")],
        *[("masks", name, {"low": 6.0, "high": 9.0}) for name in ("icepop", "sequence_product", "sequence_geomean")],
        *[("masks", name, {"low": 0.0, "high": 0.9}) for name in ("icepop", "sequence_product", "sequence_geomean")],
        ("masks", "veto", {"threshold": 1.0}),
        ("masks", "sequence_k3_mean", {"low": 1.0, "high": 0.5}),
        ("masks", "sequence_k3_mean", {"low": 1e-3}),
        ("loss", "cispo", {"low": 6.0, "high": 9.0}),
        ("loss", "cispo", {"low": 0.5, "high": 0.4}),
        ("loss", "aipo", {"delta": 0.5}),
        ("advantage", "vtrace", {"rho_bar": 0.5, "c_bar": 0.5}),
        ("advantage", "vtrace", {"c_bar": 0.5}),
        ("kl", "cap", 0.5),
    ],
)
def test_a_bound_that_cuts_what_the_policy_itself_sampled_is_refused(kind, name, options):
    algorithm = {kind: {name: options}} if kind in ("masks", "kl") else {kind: name, f"{kind}_options": options}
    with pytest.raises(ConfigError, match=rf"algorithm\.{kind}.* is .*(at (least|most) 1|less than|or equal to)"):
        parse_config({**SMALL, "algorithm": algorithm})


def test_a_horizon_that_is_just_long_enough_never_turns_beta_negative():
    config = parse_config({**SMALL, "algorithm": {"kl": {"beta": 0.1, "target": 1.0, "horizon": 4}}})
    assert kl.adaptive_beta(0.1, 0.0, target=1.0, horizon=config.algorithm.kl.horizon, num_steps=16) > 0
    assert kl.adaptive_beta(0.1, 0.0, target=1.0, horizon=3, num_steps=16) < 0


def test_an_unknown_preset_names_the_near_one_and_all():
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        load_config(QUICKSTART, ["algorithm=grppo"])


def test_stale_tokens_without_a_correction_are_let_through_for_those_who_say_so():
    changes = {"algorithm": {"correction": "none"}, "i_know": True}
    assert parse_config({**SMALL, **changes}).i_know


@pytest.mark.parametrize(
    ("changes", "largest", "most"), [({}, 4, 4), ({"group_size_end": 2}, 4, 8), ({"group_size_end": 8}, 8, 4)]
)
def test_the_largest_group_and_the_most_groups_follow_the_schedule(changes, largest, most):
    config = parse_config({**SMALL, **changes})
    assert (config.largest_group, config.most_groups) == (largest, most)


def test_remax_asks_for_one_answer_more():
    assert parse_config({**SMALL, "algorithm": {"advantage": "remax"}}).largest_group == 5


def test_a_critic_is_only_where_a_method_has_use_for_it():
    def has_critic(algorithm) -> bool:
        return Config.model_validate({**SMALL, "algorithm": algorithm}).algorithm.has_critic

    assert not has_critic({})
    assert has_critic({"advantage": "gae"}) and has_critic({"advantage": "vtrace"}) and has_critic({"advantage": "hybrid"})
