"""The configuration tree: its keys are frozen, every file parses, every mistake is one sentence that names the key."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from async_rl.config import Config, ConfigError, config_keys, load_config, parse_config

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("*.yaml"))
SMALL = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, "model": {"path": "somewhere"}}

# Adding a key is a visible decision: it is one more thing a user must know.
KEYS = """
seed run_dir num_steps max_staleness on_stale groups_per_step group_size group_size_end adaptive_group_sizes record i_know
model.path model.make model.max_model_len model.trust_remote_code
data.dataset data.options data.path data.heldout_path data.num_items data.prompt data.chat data.system data.reward
data.heldout_fraction
rollout.count rollout.engine rollout.max_new_tokens rollout.temperature rollout.stop rollout.num_slots rollout.max_num_seqs
rollout.kv_cache_bytes rollout.threads rollout.reward_workers rollout.reward_timeout_s rollout.reward_memory_bytes
rollout.lease_timeout_s rollout.max_attempts rollout.start_timeout_s rollout.timeout_s
learner.ranks learner.replicas learner.device learner.threads learner.microbatch_tokens learner.logprob_chunk_tokens learner.lr
learner.warmup_fraction learner.hold_fraction learner.min_lr_ratio learner.betas learner.weight_decay
learner.max_grad_norm learner.lr_by_ess learner.max_skipped_steps learner.step_timeout_s
algorithm.preset algorithm.advantage algorithm.advantage_options algorithm.loss algorithm.loss_options algorithm.correction
algorithm.correction_options algorithm.correction_normalize algorithm.masks algorithm.aggregation algorithm.num_minibatches
algorithm.num_epochs algorithm.proximal algorithm.entropy_coef algorithm.normalizer algorithm.normalizer_options
algorithm.overlong algorithm.overlong_buffer_tokens algorithm.zero_variance algorithm.max_refill algorithm.shuffle_rewards
algorithm.critic.path algorithm.critic.lr algorithm.critic.clip algorithm.critic.warmup_steps algorithm.critic.popart
algorithm.kl.beta algorithm.kl.into algorithm.kl.cap algorithm.kl.target algorithm.kl.horizon algorithm.kl.gate
algorithm.kl.gate_patience algorithm.kl.gate_resume_ratio algorithm.kl.gate_action algorithm.kl.gate_timeout_s
transport.host transport.port transport.keys transport.insecure transport.heartbeat_s transport.heartbeat_timeout_s
transport.connect_timeout_s transport.max_message_bytes transport.max_buffered_bytes
weights.backend weights.bucket_bytes weights.in_flight weights.phase_timeout_s
checkpoint.every checkpoint.keep checkpoint.keep_best checkpoint.resume checkpoint.max_failed_saves
eval.every eval.draws eval.timeout_s eval.target
observe.tensorboard observe.metrics_port observe.log_level
""".split()


def test_the_list_of_keys_is_frozen():
    assert config_keys() == KEYS
    assert len(KEYS) <= 120


def test_every_key_is_read_somewhere():
    """In the package, beyond the file that declares it; `insecure` is a permission that the declaration itself checks."""
    package = ROOT / "async_rl"
    declare = {package / "config" / name for name in ("schema.py", "algorithm.py", "methods.py")}
    source = "\n".join(p.read_text() for p in package.rglob("*.py") if p not in declare)
    unread = [key for key in KEYS if not re.search(rf"\.{key.split('.')[-1]}\b", source)]
    assert unread == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_file_in_configs_parses(path):
    assert load_config(path).num_steps > 0


def test_the_seed_names_the_tiny_model():
    assert load_config(ROOT / "configs" / "quickstart.yaml", ["seed=3"]).model.path == "models/tiny-seed3"


def test_the_reference_is_up_to_date():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    for path, text in reference.pages().items():
        assert path.read_text() == text, f"{path.name}: run `make docs`"


def test_every_key_has_a_docstring():
    def undocumented(section, prefix=""):
        for name, field in section.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                yield from undocumented(field.annotation, f"{name}.")
            elif not field.description:
                yield prefix + name

    assert list(undocumented(Config)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learner": {"learning_rte": 1}}, ["learner.learning_rte", "did you mean 'learner.lr'"]),
        ({"zzzzzz": 1}, ["zzzzzz", "docs/config.md"]),
        ({"learner": {"rank": 1}}, ["learner.rank", "did you mean 'learner.ranks'"]),
        ({"num_steps": 0}, ["num_steps", "0"]),
        ({"group_size": 1}, ["group_size", "2 or more"]),
        ({"rollout": {"max_new_tokens": 2048}}, ["rollout.max_new_tokens", "model.max_model_len"]),
        ({"learner": {"microbatch_tokens": 100}}, ["learner.microbatch_tokens", "model.max_model_len"]),
        ({"algorithm": {"correction": "none"}}, ["max_staleness", "algorithm.correction"]),
        ({"algorithm": {"num_minibatches": 3}}, ["algorithm.num_minibatches", "groups_per_step"]),
        ({"transport": {"host": "10.0.0.1"}}, ["transport.host", "transport.insecure"]),
        ({"transport": {"heartbeat_timeout_s": 2}}, ["transport.heartbeat_timeout_s"]),
        ({"transport": {"max_buffered_bytes": 1 << 20}, "groups_per_step": 100}, ["transport.max_buffered_bytes", "300"]),
        ({"transport": {"max_message_bytes": 1 << 16}, "group_size": 99}, ["transport.max_message_bytes"]),
        ({"learner": {"warmup_fraction": 0.7, "hold_fraction": 0.7}}, ["learner.warmup_fraction"]),
        ({"model": {}}, ["model.path", "missing"]),
        ({"run_dir": "a\0b"}, ["run_dir", "NUL"]),
        ({"rollout": {"stop": ["x", "\0"]}}, ["rollout.stop.1", "NUL"]),
    ],
)
def test_an_impossible_configuration_is_one_sentence_that_names_the_key(changes, words):
    with pytest.raises(ConfigError) as caught:
        parse_config({**SMALL, **changes})
    sentence = str(caught.value)
    assert all(word in sentence for word in words), sentence
    assert "\n" not in sentence and len(sentence) < 400


def test_a_file_that_is_no_yaml_or_absent_is_one_sentence(tmp_path):
    (tmp_path / "broken.yaml").write_text("a: [1,\n b: }")
    for path, words in ((tmp_path / "broken.yaml", "not valid YAML"), (tmp_path / "none.yaml", "does not exist")):
        with pytest.raises(ConfigError, match=words) as caught:
            load_config(path)
        assert "\n" not in str(caught.value)


def test_an_override_without_a_value_is_refused():
    with pytest.raises(ConfigError, match="write key=value"):
        load_config(FILES[0], ["num_steps"])


def test_the_digest_ignores_where_files_go_and_nothing_else():
    base = parse_config(SMALL)
    assert parse_config({**SMALL, "run_dir": "elsewhere"}).digest() == base.digest()
    assert parse_config({**SMALL, "seed": 1}).digest() != base.digest()


@pytest.mark.parametrize(
    "override",
    [
        "learner.lr=inf",
        "learner.step_timeout_s=.inf",
        "weights.phase_timeout_s=1e-9",
        "rollout.temperature=.nan",
        "learner.betas=[2,3]",
        "seed=18446744073709551616",
        "seed=-1",
        "rollout.num_slots=1000000000",
        "rollout.stop=['']",
        "eval.draws=1048576",
        "num_steps=10000000000",
        "max_staleness=10000000000",
        "groups_per_step=10000000",
        "transport.max_buffered_bytes=10000000000000000000000",
        "algorithm.num_epochs=1001",
        "algorithm.num_minibatches=1001",
        "algorithm.max_refill=1001",
        "algorithm.kl.gate_patience=10000000000",
    ],
)
def test_absurd_numbers_are_refused_by_key(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_config(ROOT / "configs" / "quickstart.yaml", [override])


@pytest.mark.parametrize(
    "override",
    [
        *("num_steps=true", "num_steps='8'", "group_size=8.0", "group_size_end=4.0", "adaptive_group_sizes=[2,16.0]"),
        *("learner.lr=true", "learner.betas=[0,true]", "rollout.count=1.0", "algorithm.advantage_options.ddof=true"),
        *("algorithm.advantage_options.ddof=0.0", "algorithm.loss_options.eps_high=true", "algorithm.shuffle_rewards=1"),
    ],
)
def test_what_is_of_another_type_is_refused_by_key(override):
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}.* is .*: Input should be a valid"):
        load_config(ROOT / "configs" / "quickstart.yaml", [override])


def test_a_float_may_be_written_as_an_integer_or_with_an_exponent():
    overrides = ["learner.lr=1e-4", "learner.weight_decay=1", "learner.betas=[0,1e-2]", "algorithm.loss_options.eps_high=1e-2"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", overrides)
    assert (config.learner.lr, config.learner.weight_decay, config.learner.betas) == (1e-4, 1.0, (0.0, 0.01))
    assert isinstance(config.learner.weight_decay, float) and config.algorithm.loss_options["eps_high"] == 0.01


@pytest.mark.parametrize("key", ["data.path", "data.heldout_path", "run_dir", "algorithm.critic.path"])
def test_an_empty_path_does_not_stand_for_another(key):
    with pytest.raises(ConfigError, match=f"config key '{key}' is '': String should have at least 1 character"):
        load_config(ROOT / "configs" / "quickstart.yaml", [f"{key}=''"])


@pytest.mark.parametrize("override", ["data.prompt={nope}=", "[=1", "seed=}", "transport.host=*"])
def test_an_override_that_is_no_yaml_is_named_not_the_file(override):
    with pytest.raises(ConfigError) as refusal:
        load_config(ROOT / "configs" / "quickstart.yaml", [override])
    assert str(refusal.value).startswith(f"override '{override}' cannot be read")


def test_an_address_that_stands_for_all_is_refused_whatever_is_allowed():
    with pytest.raises(ConfigError, match=r"transport.host is '0.0.0.0', which no rollout could connect to"):
        load_config(ROOT / "configs" / "quickstart.yaml", ["transport.host=0.0.0.0", "transport.insecure=true"])


def test_a_folder_is_no_config_file(tmp_path):
    with pytest.raises(ConfigError, match="is no regular file"):
        load_config(tmp_path)


def test_minibatches_are_counted_against_the_step_that_takes_the_fewest_groups():
    sizes = {"groups_per_step": 8, "algorithm": {"num_minibatches": 4}}
    assert parse_config(SMALL | sizes | {"group_size_end": 4}).algorithm.num_minibatches == 4
    with pytest.raises(ConfigError, match="num_minibatches is 4, more than the 2 groups of a step"):
        parse_config(SMALL | sizes | {"group_size_end": 8})
