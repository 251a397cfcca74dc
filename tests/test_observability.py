"""Rows, terminal, log, waits and report: nothing is told twice, nothing silently missing, nothing raises on half a run."""

from __future__ import annotations

import io
import json
import logging
import math
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from async_rl.observability import waiting as waiting_module
from async_rl.observability.console import WIDTH, Console, who_waits
from async_rl.observability.log import get_logger, setup_logging
from async_rl.observability.report import write_report
from async_rl.observability.sinks import JsonlSink, RunSink, TensorBoardSink, read_rows, read_run


def step_row(step: int, **more) -> dict:
    row = {
        "step": step,
        "version": step,
        "incarnation": 1,
        "time_s": float(step),
        "reward/mean": 0.5,
        "lag/mean": 1.25,
        "lag/max": 2,
        "lag/hist": [3, 2, 1],
        "rollout/tokens_per_s": 12345.6,
        "loss": -0.0123,
        "policy/grad_norm": 0.7,
        "policy/entropy": 1.5,
        "len/mean": 4.2,
        "time/step_s": 2.0,
        "idle/learner_s": 0.9,
        "idle/batch_s": 0.9,
        "idle/publish_s": 0.1,
        "ledger": {"leased": 3, "ready": 1},
    }
    return row | more


@pytest.fixture
def package_log(caplog):
    """The package's log lines, in `caplog`, whatever an earlier test did to its handlers."""
    root = logging.getLogger("async_rl")
    before = (list(root.handlers), root.propagate, root.level)
    root.propagate = True
    caplog.set_level(logging.DEBUG, logger="async_rl")
    yield caplog
    for handler in set(root.handlers) - set(before[0]):
        root.removeHandler(handler)
        handler.close()
    root.propagate, root.level = before[1:]


def test_resuming_at_step_three_leaves_no_row_of_the_steps_whose_work_was_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, None)
    for step in range(1, 7):
        sink.write({"step": step, "life": 1})
    sink.close()
    sink = JsonlSink(path, 3)
    for step in (4, 5):
        sink.write({"step": step, "life": 2})
    sink.close()
    assert [(row["step"], row["life"]) for row in read_rows(path)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]


def test_a_fresh_run_starts_its_metrics_anew_and_a_row_is_readable_before_the_file_is_closed(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    first = JsonlSink(path, None)
    first.write({"step": 1})
    assert read_rows(path) == [{"step": 1}]
    first.close()
    JsonlSink(path, None).close()
    assert read_rows(path) == []


def test_a_run_keeps_what_depends_on_the_clock_apart_and_reads_back_whole_rows(tmp_path):
    rows = [step_row(1), {"step": 1, "eval/version": 1, "eval/accuracy": 0.5, "eval/seconds": 2.0}, step_row(2)]
    sink = RunSink(tmp_path, None)
    for row in rows:
        sink.write(row)
    assert read_run(tmp_path) == rows
    learned = (tmp_path / "metrics.jsonl").read_text()
    assert "reward/mean" in learned and "eval/accuracy" in learned
    assert not any(word in learned for word in ("time", "idle", "seconds", "per_s", "ledger"))
    sink.close()


def test_a_row_whose_timing_a_kill_cut_off_shifts_no_other(tmp_path):
    sink = RunSink(tmp_path, None)
    for step in (1, 2, 3):
        sink.write(step_row(step))
    sink.close()
    timing = tmp_path / "timing.jsonl"
    kept = [line for line in timing.read_text().splitlines(keepends=True) if json.loads(line)["step"] != 2]
    timing.write_text("".join(kept))
    assert [row.get("time_s") for row in read_run(tmp_path)] == [1.0, None, 3.0]


def test_a_line_cut_short_by_a_kill_is_left_out_and_named(tmp_path, package_log):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert read_rows(path) == [{"step": 1}]
    assert "line 2" in package_log.text
    JsonlSink(path, 2).close()
    assert path.read_text() == '{"step": 1}\n'


def test_rows_are_strict_json_whatever_types_they_hold(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, None)
    sink.write(
        {"step": np.int64(1), "a": np.float32(0.5), "b": math.nan, "c": [np.inf, 1], "d": np.arange(2), "e": {1: np.nan}}
    )
    sink.close()
    strict = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert strict == {"step": 1, "a": 0.5, "b": None, "c": [None, 1], "d": [0, 1], "e": {"1": None}}


def test_tensorboard_shows_the_second_life_after_a_resume_and_not_the_lost_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, value in (((1, 2, 3, 4), 1.0), ((3, 4), 2.0)):
        sink = TensorBoardSink(tmp_path)
        for step in steps:
            sink.write({"step": step, "reward/mean": value, "lag/hist": [5, 6], "skipped": "text", "b": math.nan})
        sink.close()
        time.sleep(1.1)  # event files are told apart, and ordered, by the second of their start
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert events.Scalars("lag/hist/1")[0].value == 6
    assert set(events.Tags()["scalars"]) == {"reward/mean", "lag/hist/0", "lag/hist/1"}


def test_a_step_is_one_line_within_the_width_whatever_is_missing_or_huge():
    stream = io.StringIO()
    console = Console(100_000, stream)
    huge = dict.fromkeys(("rollout/tokens_per_s", "loss", "policy/grad_norm", "policy/entropy", "reward/mean"), -123456.789)
    for row in (step_row(99_999), {}, {"step": 1, "reward/mean": None, "loss": math.nan}, step_row(1, **huge)):
        console.step(row)
    header, *lines = stream.getvalue().splitlines()
    assert "reward" in header
    assert len(lines) == 4
    assert all(len(line) <= WIDTH for line in [header, *lines])
    assert "99999/100000" in lines[0]
    assert "1.25" in lines[0]
    assert "nan" not in stream.getvalue().lower()


def test_the_header_comes_back_before_it_has_left_the_screen_and_notices_are_told_in_full():
    stream = io.StringIO()
    console = Console(50, stream)
    for step in range(50):
        console.step(step_row(step))
    console.notice("rollout-1#2 was expelled:\nno heartbeat for 15 s " + "x" * 200)
    lines = stream.getvalue().splitlines()
    assert sum("reward" in line for line in lines) == 3
    assert lines[-1].startswith("-- rollout-1#2 was expelled: no heartbeat for 15 s")
    assert lines[-1].endswith("x" * 200)


@pytest.mark.parametrize(
    ("row", "who"),
    [
        (step_row(1), "learner 45%: batch"),
        (step_row(1, **{"idle/publish_s": 1.5}), "learner 75%: publish"),
        (step_row(1, **{"idle/batch_s": 0.01, "idle/publish_s": 0.0}), "-"),
        (step_row(1, **{"idle/batch_s": 0.0, "idle/publish_s": 0.0, "ledger": {"leased": 0}}), "rollouts"),
        ({}, "-"),
    ],
)
def test_the_line_says_who_waited_and_for_what(row, who):
    assert who_waits(row) == who


def test_a_long_wait_says_for_what_since_when_and_why_and_a_finished_one_is_silent(package_log):
    reporter, begin = waiting_module.Reporter(every_s=0.1), time.monotonic()
    with reporter.waiting("rollout-0 to commit 1:7", lambda: "12/16 ready"):
        with reporter.waiting("the disk"):
            pass
        time.sleep(0.35)
    said = [r.getMessage() for r in package_log.records]
    assert 2 <= len(said) <= (time.monotonic() - begin) / 0.1
    assert all("for rollout-0 to commit 1:7: 12/16 ready" in line and "since" in line and "MainThread" in line for line in said)
    time.sleep(0.25)
    assert len(package_log.records) == len(said)
    assert reporter.current() == []


def test_the_same_wait_of_many_is_one_line_and_a_normal_one_is_no_alarm(package_log):
    reporter = waiting_module.Reporter(every_s=0.2)
    with reporter.waiting("a lease", normal=True), ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(reporter.waiting("a reward"))
        assert [line.partition(" for ")[2] for line in reporter.lines()] == ["a lease", "a reward"]
        assert reporter.lines(older_than_s=60) == []
        time.sleep(0.3)
    levels = {(r.levelname, r.getMessage().partition(" for ")[2]) for r in package_log.records}
    assert levels == {("INFO", "a lease"), ("WARNING", "a reward")}
    assert ", and 2 more) for a reward" in package_log.text


def test_a_wait_whose_detail_hangs_or_raises_is_reported_all_the_same(package_log, monkeypatch):
    monkeypatch.setattr(waiting_module, "DETAIL_S", 0.05)
    reporter, held = waiting_module.Reporter(every_s=0.1), threading.Lock()
    with held, reporter.waiting("a lock", lambda: str(held.acquire())), reporter.waiting("a bug", lambda: str(1 / 0)):
        time.sleep(0.4)
    assert "for a lock: (no detail within" in package_log.text
    assert "for a bug: (no detail: ZeroDivisionError" in package_log.text


def test_waits_of_many_threads_are_all_known_and_end_when_the_block_raises():
    entered, leave = threading.Barrier(6), threading.Event()

    def wait(i: int) -> None:
        with waiting_module.waiting(f"thing {i}"):
            entered.wait(5)
            leave.wait(5)

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    entered.wait(5)
    assert {w.what for w in waiting_module.current()} >= {f"thing {i}" for i in range(5)}
    leave.set()
    for thread in threads:
        thread.join(5)
    with pytest.raises(RuntimeError), waiting_module.waiting("an error"):
        raise RuntimeError
    assert not [w for w in waiting_module.current() if w.what.startswith(("thing", "an error"))]


def test_the_log_names_time_level_process_and_module_and_a_second_setup_replaces_the_first(tmp_path, package_log, capsys):
    setup_logging("rollout-0", tmp_path / "a" / "one.log", "info")
    setup_logging("rollout-0", tmp_path / "two.log", "info")
    get_logger("async_rl.rollout.worker").info("hello")
    get_logger("async_rl.rollout.worker").debug("unheard")
    get_logger("__main__").warning("trouble")
    assert (tmp_path / "a" / "one.log").read_text() == ""
    first, second = (tmp_path / "two.log").read_text().splitlines()
    assert first.endswith(" INFO rollout-0 async_rl.rollout.worker: hello")
    assert second.endswith(" WARNING rollout-0 async_rl.main: trouble")
    assert "trouble" in capsys.readouterr().err


def test_a_finished_run_gets_a_small_self_contained_page_with_figure_result_and_books(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", None)
    for step in range(1, 41):
        sink.write(step_row(step))
        if step % 20 == 0:
            sink.write({"step": step, "eval/version": step, "eval/accuracy": step / 40, "eval/num": 512, "eval/missing": 0})
    sink.close()
    result = {"status": "finished", "reason": "<40> steps", "reward_last": 0.5, "ledger": {"groups": {"trained": 640}}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    page = write_report(tmp_path)
    text = page.read_text()
    assert page == tmp_path / "report.html"
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in text
    assert "<th>trained<td>640" in text
    assert "&lt;40&gt; steps" in text
    assert "<40>" not in text
    assert 'src="http' not in text
    assert len(text) < 400_000


@pytest.mark.parametrize(
    "rows", [[], [step_row(1)], [{"step": 0, "eval/accuracy": None}], [step_row(1, **{"reward/mean": None}), {"odd": 1}]]
)
def test_half_a_run_or_none_still_gets_a_report_that_says_so(tmp_path, rows):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2, "re')
    (tmp_path / "result.json").write_text('{"status": ')
    text = write_report(tmp_path).read_text()
    assert "has not ended, or was killed" in text
    assert ("No figure" in text) == (not rows)


def test_a_run_folder_without_metrics_still_gets_a_report(tmp_path):
    assert "absent or empty" in write_report(tmp_path).read_text()


def test_observability_imports_neither_torch_nor_matplotlib_nor_tensorboard():
    code = (
        "import sys; import async_rl.observability.report, async_rl.observability.waiting;"
        "print([m for m in ('torch', 'matplotlib', 'tensorboard') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "[]", out.stderr
