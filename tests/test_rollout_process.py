"""The rollout as a real process over ZeroMQ, with the toy engine: its life, its signals, its exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import save_file

from async_rl.rollout import __main__ as process_main
from async_rl.rollout.toy_engine import SCRIPT_VARIABLE
from async_rl.transport.messages import (
    Error,
    Goodbye,
    Heartbeat,
    Hello,
)
from async_rl.transport.zmq import ZmqHub
from tests.rollout_fakes import Learner, parameters, settings


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a model folder: three tensors and a tokenizer of ten words."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("run")
    model = path / "model"
    model.mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(10)}, "0")).save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    save_file(parameters(), model / "model.safetensors")
    write_config(path)
    return path


def write_config(path: Path, **transport: float) -> None:
    tree = settings(heartbeat_s=0.1, heartbeat_timeout_s=2.0, connect_timeout_s=60.0).model_dump(mode="json")
    tree["model"]["path"] = str(path / "model")
    tree["transport"] |= transport
    (path / "config.yaml").write_text(json.dumps(tree))  # JSON is YAML
    (path / "run.json").write_text('{"run_id": "run"}')


def start(path: Path, *options: str) -> subprocess.Popen[str]:
    foreign = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1"}
    script = {SCRIPT_VARIABLE: json.dumps({"token_delay_s": 0.002, "num_tokens": 10})}
    return subprocess.Popen(
        [sys.executable, "-m", "async_rl.rollout", str(path), *options],
        env=os.environ | foreign | script | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[1],
    )


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and last line of stderr; kills what does not end."""
    try:
        _, err = await asyncio.to_thread(process.communicate, timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, (err.strip().splitlines() or [""])[-1]


@pytest.mark.process
async def test_a_process_outlives_its_learner_and_leaves_nothing_behind_when_stopped(run_dir: Path) -> None:
    path = run_dir / "learner.json"
    process = start(run_dir)
    learners = []
    try:
        first = Learner(path, ZmqHub("127.0.0.1", 0, max_message_bytes=1 << 20), 1, ack=False)
        learners.append(first)
        hello = await first.hears(Hello, patience_s=90)
        assert (hello.name, hello.pid) == ("rollout-0", process.pid)
        await first.publish(0)
        first.lease(1)
        first.lease(2, max_new_tokens=900)
        (group,) = await first.gets(1)
        assert [t.reward for t in group.trajectories] == [0.0, 0.0]
        await first.close()
        second = Learner(path, ZmqHub("127.0.0.1", 0, max_message_bytes=1 << 20), 2)
        learners.append(second)
        assert (await second.gets(1))[0].group_id == 1
        assert (await second.publish(3)).checksum == second.source.checksum()
        second.lease(3, max_new_tokens=900)
        await second.hears(Heartbeat, where=lambda m: m.num_running == 1)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert (await second.hears(Goodbye)).reason == "it was stopped"
        code, sentence = await ended(process)
        assert (code, sentence) == (143, "rollout-0: stopped by SIGTERM")
        assert time.monotonic() - started < 5.5
        assert not psutil.wait_procs(children, timeout=5)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        for learner in learners:
            await learner.close()


@pytest.mark.process
async def test_processes_that_cannot_serve_say_why_in_one_sentence(run_dir: Path, tmp_path: Path) -> None:
    alone, refused = tmp_path / "alone", tmp_path / "refused"
    for path in (alone, refused):
        path.mkdir()
        (path / "model").symlink_to(run_dir / "model")
    write_config(alone, connect_timeout_s=0.5)
    write_config(refused)
    started = [start(path, "--name", path.name) for path in (alone, refused)]
    learner = Learner(refused / "learner.json", ZmqHub("127.0.0.1", 0, max_message_bytes=1 << 20))
    learner.refusal = Error(code="fatal", text="refused: its config digest is a, the learner's is b")
    (code, sentence), other = await asyncio.gather(*(ended(p) for p in started))
    await learner.close()
    assert code == 3
    assert sentence.startswith("alone: alone heard nothing from the learner for 0.5 s: looked in ")
    assert other == (2, "refused: refused: its config digest is a, the learner's is b")


@pytest.mark.process
async def test_a_signal_at_any_moment_of_the_start_ends_the_process(run_dir: Path) -> None:
    early, late = start(run_dir), start(run_dir)
    await asyncio.sleep(0.05)
    early.send_signal(signal.SIGTERM)
    assert (await ended(early))[0] in (143, -signal.SIGTERM)  # before Python can take a signal, the system does
    assert late.stderr is not None
    while "looking for the learner" not in (line := await asyncio.to_thread(late.stderr.readline)):
        assert line, "the process ended by itself"
    late.send_signal(signal.SIGINT)
    assert await ended(late) == (130, "rollout-0: stopped by SIGINT")


@pytest.mark.parametrize(
    ("config", "run", "sentence"),
    [
        (None, None, "r-0: config file {path}/config.yaml does not exist"),
        ("seed: 1", None, "r-0: config key 'num_steps' is missing"),
        *(
            ("", damaged, "r-0: {path}/run.json is missing or damaged, so the run")
            for damaged in ("{}", "[]", "null", "[" * 9999)
        ),
    ],
)
def test_a_bad_run_directory_is_one_sentence_and_exit_code_2(
    config: str | None,
    run: str | None,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(process_main, "_exit_at_the_latest_after", lambda seconds, outcome: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    if config is not None:
        (tmp_path / "config.yaml").write_text(config or json.dumps(settings().model_dump(mode="json")))
    if run is not None:
        (tmp_path / "run.json").write_text(run)
    assert process_main.main(tmp_path, "r-0") == 2
    assert capsys.readouterr().err.startswith(sentence.format(path=tmp_path))
