"""What rank 0 does before it leads, and what it says of a run on a full disk."""

from __future__ import annotations

import json
import logging
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest

from async_rl.data.ledger import Ledger
from async_rl.data.prompts import PromptStream
from async_rl.envs.tasks import Tasks
from async_rl.learner import LearnerError
from async_rl.learner.checkpoints.state import Kept, pack_state, unpack_state
from async_rl.learner.control.dealer import Dealer
from async_rl.learner.control.members import Identity
from async_rl.learner.control.sizes import sizes_of
from async_rl.learner.failure import RunFailed, tell
from async_rl.learner.lead import _announce, _finish, next_incarnation
from async_rl.learner.report.progress import Progress
from async_rl.learner.update.gate import Gate
from async_rl.learner.update.shaping import RewardShaping
from async_rl.observability.log import setup_logging
from async_rl.observability.sinks import read_run

from .learner_cases import make_config
from .ledger_samples import make_group, make_prompt, make_rules

PROMPTS = [make_prompt(n) for n in range(3)]
DAMAGES = ["cut", "no map", "no ledger", "no version", "no dealer", "no gate", "no shaping"]
DAMAGES += ["incarnation", "records", "dealer", "greedy", "gate", "shaping", "life"]


def dealer(greedy: bool = False) -> Dealer:
    return Dealer(PromptStream(PROMPTS, 0), sizes_of(make_config()), greedy)


def ledger_of(incarnation: int) -> Ledger:
    return Ledger(make_rules(), incarnation, 0)


def kept_of(dealer: Dealer, ledger: Ledger) -> Kept:
    algorithm = make_config({"advantage": "gae", "normalizer": "debiased_ema"}).algorithm
    return Kept(dealer, ledger, Gate(algorithm.kl), RewardShaping(algorithm, 12))


def test_each_life_counts_one_more_than_the_last(tmp_path: Path) -> None:
    assert [next_incarnation(tmp_path) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("damaged", [b"", b"7x", b"\xff\xfe", b"1.5"])
def test_a_damaged_count_of_lives_is_told_and_not_guessed(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "incarnation"
    path.write_bytes(damaged)
    with pytest.raises(LearnerError, match=r"incarnation is damaged: write the highest incarnation in metrics\.jsonl into it"):
        next_incarnation(tmp_path)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize("absurd", ["-5", "999999999999", str(2**31 - 1)])
def test_a_number_that_no_life_has_is_damage_too(tmp_path: Path, absurd: str) -> None:
    (tmp_path / "incarnation").write_text(absurd)
    with pytest.raises(LearnerError, match="incarnation is damaged"):
        next_incarnation(tmp_path)
    assert (tmp_path / "incarnation").read_text() == absurd


def test_a_lost_count_of_lives_is_known_from_the_checkpoint_and_the_metrics(tmp_path: Path) -> None:
    assert next_incarnation(tmp_path, saved=4) == 5
    (tmp_path / "incarnation").unlink()
    rows = [{"step": 1, "incarnation": 7}, {"step": 2}, {"step": 3, "incarnation": "9"}, {"step": 4, "incarnation": 10**12}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert next_incarnation(tmp_path, saved=4) == 8
    assert (tmp_path / "incarnation").read_text() == "8"


def test_a_state_goes_through_its_bytes(tmp_path: Path) -> None:
    first, again, ledger = dealer(), dealer(), ledger_of(1)
    first.deal(0)
    state = unpack_state(pack_state(0, kept_of(first, ledger)), tmp_path)
    assert (state.version, state.incarnation) == (0, 1)
    state.restore(kept_of(again, ledger_of(2)))
    assert again.deal(0)[0].prompt_id == first.deal(0)[0].prompt_id != dealer().deal(0)[0].prompt_id


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("was_greedy", [False, True])
def test_groups_of_a_life_with_greedy_answers_are_never_taken_by_one_without_nor_the_other_way(
    tmp_path: Path, caplog, monkeypatch, was_greedy: bool, greedy: bool
) -> None:
    monkeypatch.setattr(logging.getLogger("async_rl"), "propagate", True)  # whatever an earlier test did to it
    first, ledger, size = dealer(was_greedy), ledger_of(1), make_config().group_size
    ledger.committed("r", 0)
    records = [record for _ in range(4) if (record := ledger.grant("r", first.deal, 0.0))]
    for record in records[:2]:
        assert ledger.accept(make_group(record, [0], rollout_id="r"), 60, 0.0).outcome == "accepted"
    state = unpack_state(pack_state(0, kept_of(first, ledger)), tmp_path)
    now, again = dealer(greedy), ledger_of(2)
    state.restore(kept_of(now, again))
    again.committed("r", 0)
    assert (len(again.take(0) or []), again.books()["balanced"]) == (2 if was_greedy == greedy else 0, True)
    told = f"4 unfinished groups of the checkpoint are sampled anew: they were dealt with{'' if was_greedy else 'out'} a greedy"
    assert (told in caplog.text) == (was_greedy != greedy)
    leased = [record for _ in range(4) if (record := again.grant("r", now.deal, 0.0))]
    kept = 2 if was_greedy == greedy else 0
    assert [(r.prompt.prompt_id, r.size) for r in leased[: 4 - kept]] == [
        (r.prompt.prompt_id, size + greedy) for r in records[kept:]
    ]


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_a_damaged_state_holds_is_one_sentence(tmp_path: Path, damage: str) -> None:
    packed = pack_state(0, kept_of(dealer(), ledger_of(1)))
    held = msgpack.unpackb(packed, strict_map_key=False)
    if damage == "incarnation":
        held["ledger"]["resumes"][-1][0] = 2**40
    elif damage == "records":
        held["ledger"]["records"] = [7]
    elif damage == "dealer":
        held["dealer"]["block"] = [7]
    elif damage == "greedy":
        held["dealer"]["num_greedy"] = 2
    elif damage == "gate":
        held["gate"]["sound"] = ["newest"]
    elif damage == "shaping":
        held["shaping"]["first"] = "much"
    elif damage.startswith("no ") and damage != "no map":
        del held[damage.removeprefix("no ")]
    content: bytes = {"cut": packed[:-3], "no map": b"\x91\x01"}.get(damage) or msgpack.packb(held) or b""
    life = {"life": 1, "incarnation": 2**40 + 1}.get(damage, 2)  # that of the ledger it is to be loaded into
    with pytest.raises(LearnerError, match=r"the state in checkpoint \S+ cannot be read \(.*\): remove that folder"):
        unpack_state(content, tmp_path).restore(kept_of(dealer(), ledger_of(life)))


def progress_of(folder: Path, resume_step: int | None) -> Progress:
    return Progress(make_config(), folder, 2, resume_step, lambda ids: "")


def test_what_an_earlier_life_wrote_is_moved_aside_by_one_that_does_not_continue_it(tmp_path: Path, capsys) -> None:
    for life in ("first", "second"):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "life": life}) + "\n")
        (tmp_path / "samples").mkdir()
        (tmp_path / "samples" / "eval_000001.jsonl").write_text(life)
        progress_of(tmp_path, None)
    assert [json.loads((tmp_path / f"metrics.jsonl.{n}").read_text())["life"] for n in (1, 2)] == ["first", "second"]
    assert (tmp_path / "samples.2" / "eval_000001.jsonl").read_text() == "second" and not (tmp_path / "samples").exists()
    assert not list(tmp_path.glob("timing.jsonl.*")), "nothing is moved that held nothing"
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all(line.startswith("-- of an earlier life, which this run does not continue: ") for line in said)
    assert f"{tmp_path}/metrics.jsonl.2, {tmp_path}/samples.2" in said[1]


def test_a_life_that_continues_keeps_the_rows_and_answers_up_to_its_checkpoint(tmp_path: Path, capsys) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    progress_of(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert not list(tmp_path.glob("*.1")) and capsys.readouterr().out == ""


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """As on a full disk: what lies there can be read, and nothing can be added."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_that_a_full_disk_refuses_are_told_and_written_when_there_is_room(tmp_path: Path, capsys) -> None:
    progress = progress_of(tmp_path, None)
    with no_file_beyond(10):
        for step in (1, 2):
            progress._write({"step": step, "eval/seconds": 1.0})
    progress._write({"step": 3, "eval/seconds": 1.0})
    assert [row["step"] for row in read_run(tmp_path)] == [1, 2, 3]
    assert [row["eval/seconds"] for row in read_run(tmp_path)] == [1.0] * 3
    said = capsys.readouterr().out
    assert "-- a row could not be written (2 in a row)" in said and "timing.jsonl: File too large" in said


def test_rows_that_cannot_be_written_again_and_again_end_the_run_in_a_sentence(tmp_path: Path, capsys) -> None:
    progress = progress_of(tmp_path, None)
    with no_file_beyond(10):
        for step in (1, 2):
            progress._write({"step": step})
        with pytest.raises(RunFailed, match=r"3 rows in a row .* the last to \S+\.jsonl: File too large; free space") as caught:
            progress._write({"step": 3})
    assert caught.value.code == 4


@pytest.mark.parametrize(("status", "code", "expected"), [("finished", 0, 4), ("stopped", 143, 143), ("failed", 3, 3)])
def test_a_result_that_cannot_be_written_is_a_sentence_and_no_half_file(
    tmp_path: Path, capsys, status: str, code: int, expected: int
) -> None:
    progress = progress_of(tmp_path, None)
    with no_file_beyond(10):
        assert _finish(tmp_path, progress, {}, {}, status=status, exit_code=code, reason="all done") == expected
    told = capsys.readouterr()
    lost = f"{tmp_path}/result.json could not be written, so there is no result (File too large): free space"
    assert (f"learner: {lost}" in told.err, f"-- {lost}" in told.out) == (code == 0, code != 0)
    assert ("learner: all done" in told.err) == (code == 3)
    assert not list(tmp_path.glob("result.json*"))


def test_a_log_on_a_full_disk_says_so_once_and_shows_no_traceback(tmp_path: Path, capsys) -> None:
    logger = logging.getLogger("async_rl")
    before = (list(logger.handlers), logger.propagate, logger.level)
    setup_logging("learner-0", tmp_path / "learner-0.log", "info")
    try:
        with no_file_beyond(10):
            for n in range(3):
                logger.info("line %d", n)
    finally:
        for handler in set(logger.handlers) - set(before[0]):
            logger.removeHandler(handler)
        logger.handlers[:], logger.propagate, logger.level = before
    told = capsys.readouterr().err
    assert told.count("loses lines (File too large)") == 1 and "Traceback" not in told


def test_a_sentence_that_a_full_log_refuses_is_said_on_the_terminal(tmp_path: Path, capsys, monkeypatch) -> None:
    with (tmp_path / "learner.log").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with no_file_beyond(0):
            tell("the disk is full")
            assert sys.stderr is None, "or Python's exit code would be 120"
    assert capsys.readouterr().out == "-- failed: the disk is full\n"


@pytest.mark.parametrize(("num_heldout", "told"), [(0, False), (3, True), (4, False)])
def test_fewer_held_out_prompts_than_draws_are_told_at_the_start(tmp_path: Path, capsys, num_heldout: int, told: bool) -> None:
    progress = Progress(make_config(eval={"draws": 4}), tmp_path, 2, None, lambda ids: "")
    tasks = Tasks([make_prompt(0)], [make_prompt(n) for n in range(1, num_heldout + 1)], {})
    _announce(progress, tasks, Identity("run", "c", "t", 2), 0, None, None)
    assert ("eval.draws is 4, but only 3 prompts are held out" in capsys.readouterr().out) == told
