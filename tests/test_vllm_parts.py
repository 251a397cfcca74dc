"""What surrounds vLLM and needs none: drafts of resubmitted answers, stop strings across pieces, the environment."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from async_rl.config import parse_config
from async_rl.rollout import vllm_setup
from async_rl.rollout.vllm_engine import VllmEngine, _Draft
from async_rl.weights.base import WeightsError


def piece(ids: list[int], *spans: tuple[str, int, int], logprob_ids: list[int] | None = None) -> Any:
    """A CompletionOutput as vLLM makes it with flat log-probs."""
    flat = SimpleNamespace(token_ids=ids if logprob_ids is None else logprob_ids, logprobs=[-float(i) for i in ids])
    versions = [SimpleNamespace(version=v, start=s, end=e) for v, s, e in spans]
    return SimpleNamespace(token_ids=ids, logprobs=flat, weight_versions=versions or None)


def engine_that_decodes() -> VllmEngine:
    """No core behind it; token i reads as the letter i of the alphabet."""
    engine = VllmEngine.__new__(VllmEngine)
    decode = lambda ids, skip_special_tokens: "".join(chr(97 + i) for i in ids)  # noqa: E731
    engine._engine = SimpleNamespace(get_tokenizer=lambda: SimpleNamespace(decode=decode))  # type: ignore[assignment]
    engine._open, engine._refusal, engine._num_entering = asyncio.Event(), "", 0
    engine._open.set()
    return engine


def test_pieces_of_an_answer_join_with_their_own_versions():
    draft = _Draft([1, 2], 10)
    draft.add(piece([3, 4, 5], ("2:7", 0, 2), ("2:8", 2, 3)))
    draft.add(piece([]))
    draft.add(piece([6], ("3:8", 0, 1)))
    completion = draft.completion("stop")
    assert completion.token_ids.tolist() == [3, 4, 5, 6]
    assert completion.logprobs.tolist() == [-3.0, -4.0, -5.0, -6.0]
    assert completion.versions.tolist() == [7, 7, 8, 8]
    assert completion.incarnations.tolist() == [2, 2, 2, 3]
    assert {a.dtype for a in (completion.token_ids, completion.versions, completion.incarnations)} == {np.dtype("int32")}


def test_an_answer_without_tokens_has_empty_arrays():
    completion = _Draft([1], 10).completion("abort")
    assert [len(a) for a in (completion.token_ids, completion.logprobs, completion.versions, completion.incarnations)] == [
        0
    ] * 4


@pytest.mark.parametrize(
    "broken",
    [
        piece([3, 4], ("1:0", 0, 1)),
        piece([3, 4]),
        piece([3, 4], ("default", 0, 2)),
        piece([3, 4], ("1:0", 0, 2), logprob_ids=[3, 5]),
    ],
)
def test_tokens_without_a_version_or_with_another_tokens_log_prob_are_never_passed_on(broken):
    with pytest.raises(ValueError, match=r"vLLM returned|invalid literal"):
        _Draft([1], 10).add(broken)


def test_a_missing_log_prob_becomes_nan_which_the_learner_drops_and_counts():
    draft = _Draft([1], 10)
    broken = piece([3, 4], ("1:0", 0, 2))
    broken.logprobs.logprobs[1] = None
    draft.add(broken)
    assert np.isnan(draft.completion("stop").logprobs).tolist() == [False, True]


def test_a_stop_string_across_two_pieces_ends_the_answer_where_it_ends():
    draft = _Draft([1], 20)
    draft.add(piece([0, 1, 2], ("1:0", 0, 3)))  # "abc"
    draft.add(piece([3, 4, 5, 6], ("1:1", 0, 4)))  # "defg"
    assert engine_that_decodes()._cut_at_stop(draft, ("cde",))
    assert draft.completion("stop").token_ids.tolist() == [0, 1, 2, 3, 4]
    assert draft.completion("stop").versions.tolist() == [0, 0, 0, 1, 1]
    assert len(draft.logprobs) == 5
    assert not engine_that_decodes()._cut_at_stop(draft, ("xyz",))


async def test_a_request_waits_while_a_commit_is_under_way_and_is_refused_when_it_failed():
    engine = engine_that_decodes()
    engine._open.clear()

    async def enter() -> int:
        async with engine._entry():
            return engine._num_entering

    waiting = asyncio.create_task(enter())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    engine._open.set()
    assert await waiting == 1 and engine._num_entering == 0
    engine._refusal = "the commit failed"
    with pytest.raises(WeightsError, match="the commit failed"):
        await enter()


def test_the_environment_keeps_an_engine_on_loopback_and_leaves_a_cluster_its_own_addresses():
    tree: dict[str, Any] = {"num_steps": 1, "groups_per_step": 1, "group_size": 2, "model": {"path": "/nowhere"}}
    local = vllm_setup.environment(parse_config(tree), "/private", 12.7, "WARNING")
    assert (local["VLLM_HOST_IP"], local["GLOO_SOCKET_IFNAME"], local["VLLM_RPC_BASE_PATH"]) == ("127.0.0.1", "lo", "/private")
    assert local["VLLM_ENGINE_READY_TIMEOUT_S"] == "12" and local["OMP_NUM_THREADS"] == "1"
    assert "HF_HUB_OFFLINE" not in local  # a hub name must be fetched
    cluster = tree | {"transport": {"host": "10.0.0.5", "insecure": True}, "rollout": {"threads": 4}}
    remote = vllm_setup.environment(parse_config(cluster), "/private", 12.7, "WARNING")
    assert "VLLM_HOST_IP" not in remote and remote["OMP_NUM_THREADS"] == "4"


@pytest.mark.process  # it imports vLLM
def test_an_engine_starts_on_a_card_that_another_process_mostly_fills(tmp_path):
    utils = pytest.importorskip("vllm.v1.worker.utils")
    config = parse_config({"num_steps": 1, "groups_per_step": 1, "group_size": 2, "model": {"path": str(tmp_path)}})
    arguments = vllm_setup.engine_args(config, on_cpu=False)
    snapshot = SimpleNamespace(total_memory=24 << 30, free_memory=8 << 30, device_="cuda:0")
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        utils.request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=0.92))
    assert utils.request_memory(snapshot, arguments) < 1 << 30
    assert arguments.kv_cache_memory_bytes == config.rollout.kv_cache_bytes


def test_importing_the_engine_does_not_import_vllm():
    code = "import sys, async_rl.rollout.vllm_engine; sys.exit(any(m.split('.')[0] == 'vllm' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0
