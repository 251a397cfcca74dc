"""What a run will take of each device, and the refusal of one that cannot fit. No process is started but a false nvidia-smi."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import ConfigError, parse_config
from async_rl.launcher import machine, preflight
from async_rl.launcher.machine import cgroup_left, memory_limits, model_size
from async_rl.launcher.memory import GIB, HOST, ModelSize, estimate, lines, problem
from async_rl.launcher.plan import Machine, make_plan

SIZE = ModelSize(num_parameters=GIB, largest_tensor=GIB // 8, vocab_size=100_000)  # so 4 GiB in fp32


def demand(num_gpus: int = 0, critic: ModelSize | None = None, **sections):
    tree = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, "model": {"path": "org/name"}}
    config = parse_config({**tree, **sections})
    return estimate(config, make_plan(config, Path("/run"), Machine((0,), tuple(map(str, range(num_gpus))), {})), SIZE, critic)


def share(parts, words: str) -> float:
    """GiB of the part whose name holds the words; 0 without one."""
    return sum(part.num_bytes for part in parts if words in part.what) / GIB


def test_on_one_host_everything_adds_up_there():
    (parts,) = demand(rollout={"count": 2}).values()
    assert share(parts, "gradients") == 16
    assert share(parts, "rollouts' weights") == share(parts, "staged") == 8
    assert share(parts, "whole models") == 0, "gradients and moments take that room later"
    assert [part.num_bytes for part in parts] == sorted((part.num_bytes for part in parts), reverse=True)


@pytest.mark.parametrize(
    ("ranks", "replicas", "state", "loading"), [(4, 1, 16, 0), (4, 2, 32, 0), (4, 4, 64, 0), (8, 1, 16, 8), (16, 1, 16, 40)]
)
def test_shards_share_the_state_replicas_repeat_it_and_every_rank_loads_it_whole(ranks, replicas, state, loading):
    (parts,) = demand(learner={"ranks": ranks, "replicas": replicas}).values()
    assert share(parts, "gradients") == state
    assert share(parts, "the copy") == 0.75 * state, "parameters and moments; loading took that room before"
    assert share(parts, "whole models") == loading


def test_with_gpus_of_their_own_the_host_only_loads():
    found = demand(2)
    assert set(found) == {HOST, "GPU 0", "GPU 1"}
    assert share(found["GPU 0"], "gradients") == 16 and share(found["GPU 0"], "rollouts") == 0
    assert share(found["GPU 1"], "rollouts' weights") == share(found["GPU 1"], "staged") == 2
    assert share(found[HOST], "the copy") == 12, "where a checkpoint is written from"
    assert share(found[HOST], "whole models") == 0 and share(found[HOST], "staged") == 0


def test_one_card_for_both_holds_both_and_stages_on_the_host():
    found = demand(1)
    assert set(found) == {HOST, "GPU 0"}
    assert share(found["GPU 0"], "gradients") == 16 and share(found["GPU 0"], "rollouts' weights") == 2
    assert share(found["GPU 0"], "staged") == 0 and share(found[HOST], "staged") == 2


GAE: dict[str, Any] = {"algorithm": {"advantage": "gae"}}
KL: dict[str, Any] = {"algorithm": {"kl": {"beta": 0.1}}}
UNTIED = ModelSize(num_parameters=GIB, largest_tensor=GIB // 4, vocab_size=100_000, num_output=GIB // 4)


def test_a_critic_takes_what_the_policy_does_but_for_output_embeddings():
    (parts,) = demand(critic=SIZE, **GAE).values()
    assert share(parts, "critic's parameters, gradients and moments") == share(parts, "learner's parameters") == 16
    assert share(demand(critic=UNTIED, learner={"ranks": 2}, **GAE)[HOST], "critic's") == 12
    assert share(demand(critic=SIZE)[HOST], "critic") == 0, "grpo trains none"
    assert share(demand(**GAE)[HOST], "critic") == 0, "nobody knows its size"
    assert share(demand(2, critic=UNTIED, learner={"ranks": 2}, **GAE)["GPU 1"], "critic's") == 6


def test_a_reference_is_one_frozen_copy_in_shards_in_bf16_on_a_gpu():
    assert share(demand(learner={"ranks": 2}, **KL)[HOST], "reference") == 4
    assert share(demand(2, learner={"ranks": 2}, **KL)["GPU 0"], "reference") == 1
    assert share(demand()[HOST], "reference") == 0


def test_models_are_loaded_one_after_another_beside_those_that_are_there():
    small = ModelSize(GIB // 16, GIB // 64, 100_000)
    wide: dict[str, Any] = {"learner": {"ranks": 16}}
    assert share(demand(critic=SIZE, **wide, **GAE)[HOST], "whole models") == 16 * 4 + 4 + 12 - 32 - 24
    assert share(demand(critic=small, **wide, **GAE)[HOST], "whole models") == 16 * 4 + 4 - 17 - 12.75, (
        "the policy's was the peak"
    )
    assert share(demand(2, critic=small, **GAE)[HOST], "whole models") == 0
    assert share(demand(2, critic=ModelSize(4 * GIB, GIB, 1), **GAE)[HOST], "the copy") == 12 + 48


@pytest.mark.parametrize(
    ("num_gpus", "sections", "words"),
    [
        (0, {}, "16.0 GiB of it is the learner's parameters, gradients and moments: use a smaller model.path"),
        (1, {"learner": {"device": "cuda"}}, "gradients and moments: raise learner.ranks, or use a smaller model.path"),
        (0, {"learner": {"ranks": 2, "replicas": 2}}, "lower learner.replicas"),
        (
            0,
            {"rollout": {"kv_cache_bytes": 40 * GIB}},
            "40.0 GiB of it is the rollouts' KV cache: lower rollout.kv_cache_bytes",
        ),
        (0, {"rollout": {"count": 9}}, "lower rollout.count"),
        (0, {"learner": {"logprob_chunk_tokens": 1 << 17, "microbatch_tokens": 1 << 17}}, "lower learner.logprob_chunk_tokens"),
        (0, {"weights": {"bucket_bytes": 8 * GIB}}, "lower weights.bucket_bytes"),
    ],
)
def test_what_cannot_fit_names_its_largest_part_and_the_key(num_gpus, sections, words):
    limits = {HOST: 100 * GIB if num_gpus else 12 * GIB, "GPU 0": 12 * GIB}
    sentence = problem(demand(num_gpus, **sections), limits)
    assert words in sentence and "12.0 GiB" in sentence


def test_a_device_of_unknown_size_is_let_through_and_a_large_one_too():
    assert problem(demand(1), {HOST: 100 * GIB}) == ""
    assert problem(demand(0), {HOST: 100 * GIB}) == "" != problem(demand(0), {HOST: 10 * GIB})
    (line,) = lines(demand(0), {HOST: 100 * GIB})
    assert line.startswith("the host: about ") and " of 100.0 GiB (" in line


def write_model(folder: Path, *shapes: list[int]) -> Path:
    """A model folder whose safetensors file has a header and no data."""
    folder.mkdir(exist_ok=True)
    header = {f"w{i}": {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for i, s in enumerate(shapes)}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 50}))
    return folder


def test_the_output_embeddings_of_a_model_are_known_by_their_name(tmp_path):
    header = {name: {"dtype": "F32", "shape": [50, 8]} for name in ("model.embed_tokens.weight", "lm_head.weight")}
    folder, text = write_model(tmp_path / "m", [1]), json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert model_size(folder) == ModelSize(800, 400, 50, num_output=400)


def test_the_critics_own_model_counts_with_its_own_key(tmp_path):
    small, large = write_model(tmp_path / "s", [8]), write_model(tmp_path / "l", [1 << 40])
    algorithm = {"advantage": "gae", "critic": {"path": str(large)}}
    tree = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, "model": {"path": str(small)}, "algorithm": algorithm}
    config, host = parse_config(tree), Machine((0,), (), {})
    plan = make_plan(config, tmp_path, host)
    with pytest.raises(ConfigError, match=r"the critic's parameters.*: use a smaller algorithm\.critic\.path"):
        preflight.check_memory(config, plan, host)
    (large / "model.safetensors").unlink()
    preflight.check_memory(config, plan, host)
    assert f"not estimated: the critic, as the size of {large} is not known" in preflight.summary(config, plan, host, tmp_path)
    preflight.check_critic(config)
    (large / "config.json").unlink()
    large.rmdir()
    with pytest.raises(ConfigError, match=r"algorithm\.critic\.path is .*, which is no folder: give a Hugging Face folder"):
        preflight.check_critic(config)


def test_the_size_of_a_model_is_read_from_its_headers(tmp_path):
    assert model_size(write_model(tmp_path / "m", [50, 8], [8], [])) == ModelSize(409, 400, 50)
    assert model_size(tmp_path / "none") is None
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\xff" * 8)
    assert model_size(tmp_path / "m") is None


def test_a_run_that_cannot_fit_is_refused_before_it_starts(tmp_path):
    model = write_model(tmp_path / "m", [1 << 40])
    tree = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, "model": {"path": str(model)}}
    config, host = parse_config(tree), Machine((0,), (), {})
    with pytest.raises(ConfigError, match=r"this run takes about .* of the host, .*model\.path"):
        preflight.check_memory(config, make_plan(config, tmp_path, host), host)


def test_the_tightest_control_group_counts_and_page_cache_is_free(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    for folder, limit in ((tmp_path / "a", "1000"), (tmp_path / "a" / "b", "max")):
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 600\ninactive_file 100\n")
    assert cgroup_left(tmp_path, own) == [400]
    assert cgroup_left(tmp_path, tmp_path / "none") == []


def test_the_older_control_groups_are_read_too(tmp_path):
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:memory:/job\n1:cpu,cpuacct:/\n0::/\n")
    folder = tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("1000")
    (folder / "memory.usage_in_bytes").write_text("900")
    (folder / "memory.stat").write_text("total_inactive_file 50\ninactive_file 7\n")
    assert cgroup_left(tmp_path, own) == [150]


def test_gpus_are_known_by_index_and_uuid_and_a_hanging_tool_is_given_up(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-abc, 24576'\necho '1, GPU-def, 81920'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert memory_limits(Machine((0,), ("1", "GPU-abc"), {})).items() >= {"GPU 1": 80 * GIB, "GPU GPU-abc": 24 * GIB}.items()
    monkeypatch.setattr(machine, "SMI_DEADLINE_S", 0.2)
    tool.write_text("#!/bin/sh\nexec sleep 5\n")
    assert set(memory_limits(Machine((0,), ("0",), {}))) == {HOST}
