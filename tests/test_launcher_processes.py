"""The launcher with real processes and real signals; what it starts are stand-ins (launcher_fakes.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from async_rl.launcher.plan import ProcessSpec
from async_rl.launcher.processes import Child, Pipes
from async_rl.launcher.restarts import Restarts

from .launched import FAKES


def test_progress_goes_to_the_terminal_and_the_log_and_the_last_line_is_the_result(launch):
    run = launch("succeeds", "waits_for_end")
    code, out, err = run.end()
    assert (code, err.count("Traceback")) == (0, 0), err
    assert out.splitlines()[0] == "step 1/1"
    assert json.loads(out.splitlines()[-1]) == {"reward_last": 1.0}
    assert "step 1/1" in (run.folder / "logs" / "learner.log").read_text()
    assert run.survivors() == []


def test_a_learner_that_fails_ends_the_run_with_its_code_and_its_last_words_once(launch):
    run = launch("fails", "with_helper")
    code, _, err = run.end()
    assert code == 4
    assert err.count("the loss is not finite") == 1 and "logs/learner.log" in err
    assert run.survivors() == [], "a helper that ignores SIGTERM outlived the run"


def test_a_failure_that_the_learner_has_put_into_its_result_is_one_line_not_the_end_of_its_log(launch):
    run = launch("fails_and_says", "waits_for_end")
    code, out, err = run.end()
    assert code == 4
    (line,) = [line for line in err.splitlines() if "the loss is not finite" in line]
    assert line.startswith("async-rl: the learner ended with exit code 4: the loss") and line.endswith("logs/learner.log")
    assert json.loads(out.splitlines()[-1])["exit_code"] == 4


def test_the_end_of_a_log_is_that_of_this_life_alone(launch, tmp_path):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    for name in ("learner", "rollout-0"):
        (logs / f"{name}.log").write_text("step 7/9 of the run before\n")
    _, _, err = launch("fails", "waits_for_end").end()
    assert "the loss is not finite" in err and "of the run before" not in err
    assert "step 7/9" in (logs / "learner.log").read_text(), "the log itself keeps all lives"


def test_what_a_refused_run_ends_with_is_not_the_result_of_the_run_before(launch, tmp_path):
    (tmp_path / "run").mkdir()
    old = json.dumps({"status": "stopped", "exit_code": 2, "reason": "old"})
    (tmp_path / "run" / "result.json").write_text(old)
    code, out, _ = launch("refuses", "waits_for_end").end()
    said = json.loads(out.splitlines()[-1])
    assert (code, said["status"], said["exit_code"]) == (2, "failed", 2)
    assert said["reason"] == "the learner ended with exit code 2: data.path is absent"
    assert (tmp_path / "run" / "result.json").read_text() == old, "the folder is as it was"


def test_two_writers_of_a_log_never_share_a_line(tmp_path):
    program = (
        "import os, time; os.write(1, b'half'); time.sleep(.3); os.write(2, b'other\\n'); time.sleep(.3); os.write(1, b' line')"
    )
    child = Child(ProcessSpec("x", (sys.executable, "-c", program), dict(os.environ), tmp_path / "x.log", None, ()), piped=True)
    pipes = Pipes()
    pipes.add(child)
    while child.poll() is None:
        pipes.pass_on(0.05)
    pipes.pass_on(0.0)
    child.close()
    assert (tmp_path / "x.log").read_text() == "other\nhalf line\n"


def test_the_pipe_of_a_process_whose_leftovers_hold_it_is_free_for_the_next(tmp_path):
    left = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)']).pid, flush=True)"
    )

    def start(program: str) -> Child:
        return Child(
            ProcessSpec("x", (sys.executable, "-c", program), dict(os.environ), tmp_path / "x.log", None, ()), piped=True
        )

    pipes, first = Pipes(), start(left)
    pipes.add(first)
    first.popen.wait(20)
    pipes.pass_on(0.1)
    pipes.drop(first)
    first.close()
    second = start("print('the next')")
    pipes.add(second)
    second.popen.wait(20)
    pipes.pass_on(1.0)
    second.close()
    pid, said = (tmp_path / "x.log").read_text().split(maxsplit=1)
    os.kill(int(pid), signal.SIGKILL)
    assert said == "the next\n"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("loading\nrollout-0: no learner at 127.0.0.1\nnoise of a library\n", "no learner at 127.0.0.1"),
        (
            "Traceback:\n  here\nValueError: no such planet\nx.py:1: UserWarning: leaked\n  warnings.warn(\n",
            "ValueError: no such planet",
        ),
        ("", ""),
        (
            "ValueError: the cause\nException ignored in: <function f>\nTypeError: 'NoneType' is no function",
            "ValueError: the cause",
        ),
        ("Traceback (most recent call last):\n  here\nAssertionError\n", "AssertionError"),
        ("word " * 100, ("word " * 100)[:199] + "…"),
        ("rollout-0: rank 1 failed: boom\nrollout-0: rank 0 has lost rank 1: closed\n", "rank 1 failed: boom"),
        ("rollout-0: rank 0 has lost rank 1: closed\n", "rank 0 has lost rank 1: closed"),
    ],
)
def test_the_last_words_of_a_process_are_its_last_sentence(tmp_path, said, words):
    log = tmp_path / "rollout-0.log"
    log.write_text("rollout-0: the words of an earlier life\n")
    program = (sys.executable, "-c", "import sys; sys.stderr.write(sys.argv[1])", said)
    child = Child(ProcessSpec("rollout-0", program, dict(os.environ), log, None, ()))
    child.popen.wait(20)
    child.close()
    assert child.last_words() == words


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("(MainProcess pid=29154) WARNING 11-30 10:01:02 [llm.py:12] Using None for EOS token id", ""),
        ("2026-11-30 10:01:02.123 INFO rollout-0 async_rl.rollout: joined\n[W1130 10:01:02.4 socket.cpp:7] slow", ""),
        ("Loading checkpoint shards: 100%|####| 1/1", ""),
        ("-- rollout-0#1 joined", ""),
        ("Triton is installed, but doesn't include CPU backend. Disabling Triton.", ""),
        ("(Worker pid=9) ERROR 11-30 10:01:02 core.py:1] out of memory\n(Worker pid=9) INFO 11-30 x", "(Worker pid=9) ERROR"),
        ("Fatal Python error: Segmentation fault", "Fatal Python error: Segmentation fault"),
        ("rollout-0: the INFO is ours", "the INFO is ours"),
    ],
)
@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 9)", "sys.exit(137)"])  # torchrun has an exit code for its ranks
def test_of_a_killed_process_only_errors_are_last_words(tmp_path, said, words, ends):
    program = (sys.executable, "-c", f"import os, sys; sys.stderr.write(sys.argv[1]); sys.stderr.flush(); {ends}", said)
    child = Child(ProcessSpec("rollout-0", program, dict(os.environ), tmp_path / "rollout-0.log", None, ()))
    child.popen.wait(20)
    child.close()
    assert child.last_words().startswith(words) and bool(child.last_words()) == bool(words)


def test_a_rollout_that_breaks_the_same_way_twice_ends_the_run_within_15_s(launch):
    begin = time.monotonic()
    run = launch("stoppable", "breaks")
    code, out, err = run.end()
    assert code == 3 and time.monotonic() - begin < 15 + 10  # 10 s for three Pythons to start on a busy machine
    assert len(run.pids("rollout")) == 2, "one second chance, then no more of the same"
    again, gone, last = (line for line in err.splitlines() if "rollout-0 ended with exit code 1" in line)
    assert 'its last words: "rollout: the engine refuses this model"; starting it again (restart 1, 1 of 3 in a row' in again
    assert again.endswith("logs/rollout-0.log") and "as before; it is not started again" in gone
    assert last.endswith("logs/rollout-0.log:") and "    rollout: the engine refuses this model" in err.splitlines()
    said = json.loads(out.splitlines()[-1])
    assert (said["status"], said["exit_code"]) == ("failed", 3), "how the run ended, not how the learner did"
    assert said["reason"] == "no rollout is left: rollout-0 ended with exit code 1: rollout: the engine refuses this model"
    assert json.loads((run.folder / "heard.json").read_text()) == [signal.SIGTERM], "the learner was asked to stop"
    assert run.survivors() == []


def test_a_rollout_that_delivers_and_breaks_in_the_same_way_is_started_again_and_again(launch):
    run = launch("waits_for_six_rollouts", "delivers_and_breaks")
    code, _, err = run.end()
    assert code == 0, err
    assert "starting it again (restart 5); its log" in err and "as before" not in err


def test_a_run_without_rollouts_of_its_own_goes_on_with_those_started_by_hand(launch):
    run = launch("has_another", "breaks")
    code, out, err = run.end()
    assert code == 0, err
    assert "it is not started again" in err and "async-rl: the run goes on with mine#4, started by hand" in err.splitlines()
    assert json.loads(out.splitlines()[-1]) == {"reward_last": 1.0}


def test_a_rollout_that_is_killed_is_started_again(launch):
    run = launch("waits_for_second_rollout", "killed_once")
    code, out, err = run.end()
    assert code == 0, err
    assert "rollout-0 was killed by SIGKILL; starting it again (restart 1, 1 of 3 in a row without progress)" in err
    assert json.loads(out.splitlines()[-1]) == {"reward_last": 1.0}


def test_a_learner_that_is_killed_is_started_again_when_there_is_a_checkpoint(launch):
    run = launch("killed_once", "waits_for_end")
    code, out, err = run.end()
    assert code == 0, err
    assert len(run.pids("learner")) == 2 and "from its checkpoint (restart 1)" in err
    assert out.splitlines()[:-1] == ["step 1/1"]


def test_a_learner_that_is_killed_goes_on_as_often_as_its_lives_leave_a_newer_checkpoint(launch):
    run = launch("killed_often", "waits_for_end")
    code, _, err = run.end()
    assert code == 0, err
    assert len(run.pids("learner")) == 7 and "from its checkpoint (restart 6)" in err


def test_a_learner_whose_lives_come_to_nothing_is_started_again_three_times(launch):
    run = launch("killed_in_vain", "waits_for_end")
    code, _, err = run.end()
    assert code == 128 + signal.SIGKILL
    assert len(run.pids("learner")) == 5, "the first left a checkpoint, the other four none"
    assert "(restart 1)" in err and "(restart 4, 3 of 3 in a row without progress)" in err
    assert "SIGKILL and is not started again: 3 restarts in a row have left no newer checkpoint" in err


def test_a_checkpoint_that_latest_does_not_name_is_one_to_start_from(launch):
    run = launch("killed_unnamed", "waits_for_end")
    code, _, err = run.end()
    assert code == 0, err
    assert len(run.pids("learner")) == 2 and "from its checkpoint (restart 1)" in err


def test_a_learner_that_is_killed_before_its_first_checkpoint_ends_the_run_and_says_so(launch):
    run = launch("killed_at_once", "waits_for_end")
    code, _, err = run.end()
    assert code == 128 + signal.SIGKILL and len(run.pids("learner")) == 1
    assert "the learner was killed by SIGKILL before its first checkpoint (checkpoint.every) and is not started again" in err


def test_a_learner_and_a_rollout_that_are_killed_together_are_both_started_again(launch):
    run = launch("killed_with_rollout", "waits_for_end")
    code, _, err = run.end()
    assert code == 0, err
    assert len(run.pids("learner")) == len(run.pids("rollout")) == 2
    assert "from its checkpoint (restart 1)" in err and "rollout-0 was killed by SIGKILL; starting it again" in err


def test_a_learner_that_lost_a_rank_is_started_again_from_its_checkpoint(launch):
    run = launch("loses_a_rank", "waits_for_end")
    code, _, err = run.end()
    assert code == 0, err
    assert len(run.pids("learner")) == 2 and "the learner lost one of its ranks; starting it again from its checkpoint" in err


def test_a_rollout_that_has_served_for_a_while_has_earned_its_restarts_back():
    restarts = Restarts()
    assert [restarts.allow(fruitful) for fruitful in (False, False, False, True, False, False, False)] == [True] * 7
    assert str(restarts) == "restart 7, 3 of 3 in a row without progress"
    assert not restarts.allow(False) and restarts.count == 7


def test_ctrl_c_reaches_each_rank_once_and_a_run_without_a_step_says_that_it_was_stopped(launch, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text('{"status": "stopped", "exit_code": 130, "reason": "old"}')
    run = launch("torchrun", "waits_for_end")
    run.wait_for("rank")
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.end()
    assert code == 130, err
    reason = "stopped by SIGINT before the first step"
    expected = {"status": "stopped", "exit_code": 130, "reason": reason, "run_dir": str(run.folder)}
    assert json.loads(out.splitlines()[-1]) == json.loads((run.folder / "result.json").read_text()) == expected
    assert f"async-rl: {reason}; nothing new was saved" in err.splitlines()
    assert json.loads((run.folder / "heard.json").read_text()) == [signal.SIGINT]
    assert "Traceback" not in err and run.survivors() == []


def test_ctrl_c_while_the_learners_interpreter_starts_is_a_stop_and_no_bug(launch):
    run = launch("too_young", "waits_for_end")
    run.wait_for("rank")
    run.process.send_signal(signal.SIGINT)
    code, out, err = run.end()
    assert code == json.loads(out.splitlines()[-1])["exit_code"] == 130, err
    assert "noise" not in err


def test_a_second_ctrl_c_kills_a_learner_that_does_not_listen(launch):
    run = launch("deaf", "with_helper")
    run.wait_for("learner")
    run.wait_for("rollout")
    time.sleep(0.5)  # for its handlers
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert run.process.poll() is None, "the first one waits for the learner"
    run.process.send_signal(signal.SIGINT)
    code, out, _ = run.end(30)
    assert code == json.loads(out.splitlines()[-1])["exit_code"] == 130
    assert json.loads(out.splitlines()[-1])["reason"] == "stopped by SIGINT and at once by SIGINT, without a new checkpoint"
    assert run.survivors() == []


def test_everything_dies_with_a_launcher_that_is_killed(launch):
    run = launch("torchrun", "waits_for_end")
    run.wait_for("rank")
    run.wait_for("rollout")
    run.process.kill()
    run.process.wait(10)
    assert run.survivors() == []


def test_a_run_folder_takes_one_run_at_a_time(launch, tmp_path):
    first = launch("stoppable", "waits_for_end")
    first.wait_for("rank")
    second = subprocess.run(
        [sys.executable, str(FAKES), "launcher", "succeeds", "waits_for_end", str(first.folder)], capture_output=True, text=True
    )
    assert second.returncode != 0 and "another run is at work" in second.stderr
    first.process.send_signal(signal.SIGTERM)
    assert first.end()[0] == 143


@pytest.mark.process
def test_torchrun_ends_with_the_code_of_the_rank_that_failed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "async_rl.learner.torchrun", "1", str(tmp_path)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 2, done.stderr  # no config.yaml there
    assert "config.yaml" in done.stderr and "ChildFailedError" not in done.stderr
