"""Real vLLM: exact log-probs and versions across updates, bit-equal weights, and every failure a sentence.

All tests judge what one process (vllm_driver.py) saw while it played a rollout with two engines, untied and tied.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.types import Completion

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

DRIVER = Path(__file__).with_name("vllm_driver.py")
START_AND_SCENES_S = 360
EXACT = 1e-4
SPEC = importlib.util.spec_from_file_location("vllm_driver", DRIVER)
assert SPEC is not None and SPEC.loader is not None
driver = importlib.util.module_from_spec(SPEC)
sys.modules["vllm_driver"] = driver
SPEC.loader.exec_module(driver)


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> Iterator[tuple[dict[str, Any], subprocess.Popen, int]]:
    """(what was seen, the driver's process, the id of its engine core); both processes still live."""
    folder = tmp_path_factory.mktemp("vllm")
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(DRIVER.parent.parent)}
    log = folder / "driver.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(DRIVER), str(folder)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_AND_SCENES_S
        while not (folder / "seen.pkl").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (folder / "seen.pkl").exists(), log.read_text()[-4000:]
        assert process.stdout is not None
        core = next(int(line.split()[1]) for line in process.stdout if line.startswith("held "))
        yield pickle.loads((folder / "seen.pkl").read_bytes()), process, core  # noqa: S301 (written by our own child)
    finally:
        with suppress(ProcessLookupError):  # the whole group: a core that outlived its parent is in it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def scene(held: Any, name: str, which: str = "untied") -> Any:
    seen = held[0][which][name]
    assert not isinstance(seen, str), seen
    return seen


@cache
def model_of(tied: bool, version: int) -> Any:
    return driver.weights(tied, version).eval()


@torch.no_grad()
def reference(completion: Completion, version: int, temperature: float = 1.0, tied: bool = False) -> np.ndarray:
    """float64 [T]: log-probs of the sampled ids by a Hugging Face forward over the whole sequence."""
    ids = np.concatenate([completion.prompt_ids, completion.token_ids])
    logits = model_of(tied, version)(torch.from_numpy(ids).long()[None]).logits[0].double() / (temperature or 1.0)
    logp = torch.log_softmax(logits, -1)[len(completion.prompt_ids) - 1 : -1]
    return logp[torch.arange(len(completion.token_ids)), torch.from_numpy(completion.token_ids).long()].numpy()


def off(completion: Completion, version: int, where: Any = slice(None), **kwargs: Any) -> float:
    """Largest difference of the recorded log-probs to the reference over a part of the answer."""
    return float(np.abs(completion.logprobs - reference(completion, version, **kwargs))[where].max())


def check_spans(answers: list[Completion], versions: list[int]) -> None:
    for answer in answers:
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == 200
        assert answer.finish_reason == "length"
        assert (np.diff(answer.versions) >= 0).all() and set(answer.versions.tolist()) == set(versions)
        assert (answer.incarnations == 1).all()


def test_nothing_is_generated_before_the_first_commit(held):
    seen = scene(held, "before_the_first_commit")
    assert seen["generate"].startswith("WeightsError: the engine has no named weights yet")
    assert seen["commit"] == "WeightsError: no weights were prepared"


def test_a_manifest_that_does_not_fit_is_refused_before_any_byte_moves(held):
    seen = scene(held, "before_the_first_commit")
    assert "missing: model.norm.weight; unexpected: model.norm.weigth" in seen["renamed"]
    assert "lm_head.weight float32[149, 64] instead of float32[150, 64]" in seen["reshaped"]
    assert (
        "lm_head.weight bfloat16[150, 64] instead of float32[150, 64]" in seen["retyped"] and "and 15 more" in seen["retyped"]
    )
    for text in (seen["renamed"], seen["reshaped"], seen["retyped"]):
        assert text.startswith("WeightsError: ") and "\n" not in text


def test_requests_that_are_told_to_be_one_batch_are_it_however_late_they_come(held):
    """Floats round by what is computed together: equal bits are the proof of equal batches."""
    seen = scene(held, "one_batch")
    for prompt, late in zip(seen["0.0"], seen["0.005"], strict=True):
        assert (prompt.token_ids == late.token_ids).all()
        assert (prompt.logprobs == late.logprobs).all()
    assert len(seen["alone"][0].token_ids) == 20


@pytest.mark.parametrize(("which", "version"), [("untied", 0), ("tied", 0), ("tied", 1)])
def test_the_engine_holds_the_sent_bits_also_in_fused_and_tied_tensors(held, which, version):
    """Judged by vLLM's own digests, which know nothing of our names and cuts."""
    sent = dict(model_of(which == "tied", version).named_parameters())
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    seen = scene(held, f"weights_held:{version}", which)
    assert ("lm_head.weight" in seen) == (which == "untied")
    num_compared = 0
    for name, value in seen.items():
        path, _, leaf = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        tensor = torch.cat([sent[f"{parent}.{part}.{leaf}"] for part in fused[last]]) if last in fused else sent[name]
        if last in ("embed_tokens", "lm_head"):  # vLLM pads the vocabulary with zeros
            padding = -len(tensor) % 64
            tensor = torch.nn.functional.pad(tensor, (0, 0, 0, padding))
        assert hashlib.sha256(tensor.detach().contiguous().numpy().data).hexdigest() == value, name
        num_compared += len(fused.get(last, [0]))
    assert num_compared == len(sent)


@pytest.mark.parametrize("which", ["untied", "tied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_at_lag_zero_match_hugging_face(held, which, temperature):
    tied = which == "tied"
    for answer in scene(held, "same_weights", which)[str(temperature)]:
        assert off(answer, 1 if tied else 0, temperature=temperature, tied=tied) < EXACT
        assert (answer.versions == (1 if tied else 0)).all()


def test_greedy_answers_are_hugging_face_greedy(held):
    for answer in scene(held, "same_weights")["0.0"]:
        ids = torch.from_numpy(np.concatenate([answer.prompt_ids, answer.token_ids])).long()
        with torch.no_grad():
            best = model_of(False, 0)(ids[None]).logits[0].argmax(-1)[len(answer.prompt_ids) - 1 : -1]
        assert best.tolist() == answer.token_ids.tolist()


def test_a_seeded_request_gives_the_same_answer_again_alone_as_in_a_batch(held):
    seen = scene(held, "same_weights")
    assert seen["again"][0].token_ids.tolist() == seen["1.0"][0].token_ids.tolist()
    assert len({tuple(a.token_ids.tolist()) for a in seen["1.0"]}) == 4


def test_recompute_makes_every_span_equal_a_forward_with_its_versions_weights(held):
    seen = scene(held, "recompute")
    check_spans(seen["answers"], seen["versions"])
    for answer in seen["answers"]:
        for version in seen["versions"]:
            assert off(answer, version, answer.versions == version) < EXACT
        assert (
            off(answer, seen["versions"][0], answer.versions == seen["versions"][2]) > 0.1
        )  # unrelated weights: a wrong label would show


def test_abort_resubmits_the_partial_and_every_span_is_exact(held):
    seen = scene(held, "abort_mode")
    check_spans(seen["answers"], seen["versions"])
    for answer in seen["answers"]:
        for version in seen["versions"]:
            assert off(answer, version, answer.versions == version) < EXACT
        assert answer.prompt_ids.tolist()[0] in range(20, 23) and len(answer.prompt_ids) == 6


def test_keep_goes_on_with_the_old_cache_and_later_requests_do_not_see_it(held):
    seen = scene(held, "keep")
    check_spans(seen["answers"], seen["versions"])
    first, second, third = seen["versions"]
    for answer in seen["answers"]:
        assert off(answer, first, answer.versions == first) < EXACT
        assert off(answer, second, answer.versions == second) > 1e-2  # the old KV cache is in it: that is what keep means
    for answer in seen["later"]:  # same prompts of more than one cache block, after the updates
        assert (answer.versions == third).all()
        assert off(answer, third) < EXACT


def test_prompts_that_the_engine_cannot_take_end_as_errors_and_leave_it_alive(held):
    seen = scene(held, "refusals")
    for name in ("too long", "unknown id", "empty"):
        assert seen[name].finish_reason == "error"
        assert len(seen[name].token_ids) == len(seen[name].versions) == 0
    assert seen["full"].finish_reason == "length" and len(seen["full"].token_ids) == 400 - 395


def test_an_aborted_answer_returns_what_it_has_and_a_cancelled_one_leaves_nothing(held):
    aborted, num_unfinished, drafts = scene(held, "user_abort")
    assert aborted.finish_reason == "abort" and 0 < len(aborted.token_ids) < 390
    assert len(aborted.logprobs) == len(aborted.versions) == len(aborted.token_ids)
    assert num_unfinished == 0 and drafts == {}


def test_a_silent_sender_is_a_sentence_within_the_deadline_and_a_new_membership_works(held):
    seen = scene(held, "silent_sender")
    assert seen["early"].startswith("WeightsError: the weights have not arrived within 0.2 s")
    assert seen["silent"].startswith("WeightsError: a broadcast of ") and "membership" in seen["silent"]
    assert seen["silent_s"] < 10
    assert seen["not formed"].startswith("WeightsError: forming the weight group of membership")
    assert (seen["meanwhile"].versions == seen["before"]).all() and len(seen["meanwhile"].token_ids) == 10
    assert (seen["after"].versions == 51).all() and off(seen["after"], 51) < EXACT


def test_a_commit_that_does_not_finish_leaves_the_engine_serving_nothing_until_a_good_one(held):
    seen = scene(held, "frozen_core")
    assert seen["commit"].startswith("WeightsError: committing 1:52 weights: the engine core did not answer within 1 s")
    assert seen["ping"].startswith("EngineDead: the engine core has not answered for 0.5 s")
    for key in ("generate", "still dirty"):
        assert seen[key].startswith("WeightsError: the commit of 1:52 failed")
    assert (seen["after"].versions == 53).all() and off(seen["after"], 53) < EXACT
    assert len(seen["in flight"].token_ids) == 390 and 52 not in seen["in flight"].versions


def test_an_idle_core_that_freezes_while_requests_enter_together_is_dead_within_its_deadline(held):
    seen = scene(held, "frozen_idle_core", "tied")
    for moment in ("pause", "resume"):
        assert seen[moment].startswith("EngineDead: the idle engine core has not answered for 1 s")
        assert seen[f"{moment}_s"] < 10


def test_a_killed_core_is_reported_as_dead_at_once(held):
    seen = scene(held, "killed_core")
    assert seen["generate"].startswith("EngineDead: ") and seen["ping"].startswith("EngineDead: ")


def test_answers_end_at_any_of_the_models_end_tokens_and_keep_it(held):
    seen = scene(held, "ends", "tied")
    assert seen["ids"] == sorted(driver.END_IDS)
    ended = [a for a in seen["answers"] if a.finish_reason == "stop"]
    assert {int(a.token_ids[-1]) for a in ended} == set(driver.END_IDS)
    for answer in ended:
        assert not set(answer.token_ids[:-1].tolist()) & set(driver.END_IDS)


def test_a_stop_string_ends_an_answer_with_as_many_log_probs_as_tokens(held):
    stopped = [a for a in scene(held, "ends", "tied")["stopped"] if a.token_ids[-1] == ord(driver.STOP) - 77]
    assert stopped
    for answer in stopped:
        assert answer.finish_reason == "stop"
        assert (answer.token_ids[:-1] != ord(driver.STOP) - 77).all()
        assert len(answer.logprobs) == len(answer.token_ids)


def test_close_leaves_neither_files_nor_a_core(held):
    assert held[0]["left_behind"] == [False, False]


def test_the_core_dies_with_a_parent_that_is_killed(held):
    _, process, core = held
    assert Path(f"/proc/{core}").exists()
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    deadline = time.monotonic() + 5
    while running(core) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running(core)


def running(pid: int) -> bool:
    try:
        return " (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
