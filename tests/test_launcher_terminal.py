"""A launcher whose terminal is gone, hung up or full, and what it says when it is stopped early."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest


@pytest.mark.parametrize("terminal", ["closed", "a pipe that nobody reads", "on a full disk"])
def test_a_terminal_that_takes_no_word_ends_no_run(launch, terminal: str):
    if terminal == "closed":
        reader, writer = os.openpty()
    elif terminal == "on a full disk":
        reader, writer = None, os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
    run = launch("waits_for_second_rollout", "killed_once", terminal=writer)
    os.close(writer)
    if reader is not None:
        os.close(reader)
    assert run.process.wait(60) == 0
    assert json.loads((run.folder / "result.json").read_text()) == {"reward_last": 1.0}


def test_a_hang_up_ends_a_run_but_not_under_nohup(launch):
    run = launch("stoppable", "waits_for_end", through=("nohup",))
    run.wait_for("rank")
    run.process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert run.process.poll() is None and not (run.folder / "heard.json").exists()
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 128 + signal.SIGTERM


def test_a_run_that_is_stopped_before_its_learner_is_up_names_the_checkpoint_that_it_keeps(launch, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_000085\n")
    run = launch("torchrun", "waits_for_end")
    run.wait_for("rank")
    run.process.send_signal(signal.SIGTERM)
    _, out, _ = run.end()
    reason = "stopped by SIGTERM before the first step of this life; the checkpoint of version 85 is kept"
    assert json.loads(out.splitlines()[-1])["reason"] == reason
