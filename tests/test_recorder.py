"""The record of a run: entries are whole or known not to be, a full disk is told, and a replay's ledger keeps its books."""

from __future__ import annotations

import os
import resource
from collections import Counter
from pathlib import Path

import msgpack
import pytest

from async_rl.config import Config
from async_rl.data.ledger import Ledger
from async_rl.data.record import LedgerError, Record
from async_rl.data.replay import ReplayLedger
from async_rl.learner import LearnerError
from async_rl.learner.failure import RunFailed
from async_rl.learner.replay import Order, _check
from async_rl.learner.report.recorder import (
    BATCHES,
    RECORD,
    Life,
    Recorded,
    Recorder,
    cut_record,
    life_of,
    model_digest,
    read_record,
)
from async_rl.observability.entries import EntryError, EntryWriter, read_entries
from async_rl.transport.codec import decode_group, encode_group

from .learner_cases import make_config
from .ledger_samples import make_group, make_prompt, make_rules
from .runs import random_model

LIFE = Life(1, 0, "run", {"num_steps": 4}, "model", "tokenizer")


def contents(path: Path, start: int = 0) -> list[dict]:
    return [entry.content for entry in read_entries(path, start)]


def written(path: Path, number: int) -> list[int]:
    """A file of so many entries; where each ends."""
    writer, ends = EntryWriter(path, 0), []
    for k in range(number):
        writer.append({"k": k, "data": b"x" * (100 + k)})
        ends.append(writer.end)
    writer.close()
    return ends


def test_entries_come_back_also_from_the_middle(tmp_path: Path) -> None:
    ends = written(tmp_path / "file", 3)
    assert [each["k"] for each in contents(tmp_path / "file")] == [0, 1, 2]
    assert [each["k"] for each in contents(tmp_path / "file", ends[0])] == [1, 2]


def test_wherever_a_kill_cuts_the_last_entry_it_is_left_out_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "file"
    ends, whole = written(path, 3), (tmp_path / "file").read_bytes()
    for size in range(ends[1], ends[2]):
        path.write_bytes(whole[:size])
        assert [each["k"] for each in contents(path)] == [0, 1]
    path.write_bytes(whole[: ends[2] - 50] + bytes(50))  # the length is there, the content is not, as after a power cut
    assert [each["k"] for each in contents(path)] == [0, 1]


def test_damage_before_the_last_entry_is_never_taken_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    ends, whole = written(path, 3), (tmp_path / "file").read_bytes()
    for at in (ends[0], ends[0] + 7, ends[0] + 20, ends[0] + 43, ends[0] + 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with pytest.raises(EntryError, match=f"the entry at byte {ends[0]} "):
            contents(path)


def test_a_writer_cuts_what_lies_behind_its_place_and_refuses_a_file_that_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "file"
    ends = written(path, 3)
    writer = EntryWriter(path, ends[0])
    writer.append({"k": "new"})
    writer.close()
    assert [each["k"] for each in contents(path)] == [0, "new"]
    with pytest.raises(OSError, match=f"where {ends[2]} were written"):
        EntryWriter(path, ends[2])


def taken(num: int = 2) -> list[Record]:
    """A batch as a ledger hands it out."""
    ledger = Ledger(make_rules(groups_per_step=num), 1, 0)
    ledger.committed("r", 0)
    records = [ledger.grant("r", lambda step, n=n: (make_prompt(n), 2), 0.0) for n in range(num)]
    for record in records:
        assert record and ledger.accept(make_group(record, [0], rollout_id="r"), 60, 0.0).outcome == "accepted"
    batch = ledger.take(0)
    assert batch
    return batch


def recorder(folder: Path, position: int = 0, max_failed: int = 3) -> tuple[Recorder, Counter[str], list[str]]:
    events, said = Counter(), []
    return Recorder(folder, position, LIFE, max_failed, events, said.append), events, said


def test_a_batch_comes_back_exactly_as_it_was_taken(tmp_path: Path) -> None:
    own, _, _ = recorder(tmp_path)
    batch = taken()
    own.batch(0, batch)
    own.close()
    life, found = read_record(tmp_path / RECORD / BATCHES)
    assert isinstance(life, Life) and life[:-1] == LIFE[:-1]
    assert isinstance(found, Recorded) and (found.version, found.incarnation, found.end) == (0, 1, own.position)
    for ours, theirs in zip(batch, found.records, strict=True):
        assert (ours.group_id, ours.attempt, ours.born, ours.size) == (
            theirs.group_id,
            theirs.attempt,
            theirs.born,
            theirs.size,
        )
        assert ours.prompt.prompt_id == theirs.prompt.prompt_id and ours.payload and theirs.payload
        assert [bytes(f) for f in encode_group(ours.payload)] == [bytes(f) for f in encode_group(theirs.payload)]


def test_the_next_life_goes_on_where_its_checkpoint_stands(tmp_path: Path) -> None:
    own, _, _ = recorder(tmp_path)
    own.batch(0, taken())
    position = own.position
    own.batch(1, taken())
    own.close()
    again, _, _ = recorder(tmp_path, position)
    again.batch(1, taken(3))
    again.close()
    found = list(read_record(tmp_path / RECORD / BATCHES))
    assert [len(each.records) if isinstance(each, Recorded) else "life" for each in found] == ["life", 2, "life", 3]
    cut_record(tmp_path, position)
    assert len(list(read_record(tmp_path / RECORD / BATCHES))) == 2
    with pytest.raises(LearnerError, match=r"record/batches cannot be written on \(it has \d+ bytes, where \d+ were written\)"):
        recorder(tmp_path, position + 1)


def test_a_full_disk_is_told_and_counted_costs_no_batch_and_ends_the_run_when_it_lasts(tmp_path: Path) -> None:
    own, events, said = recorder(tmp_path)
    path, batch = tmp_path / RECORD / BATCHES, taken()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))
        own.batch(0, batch)
        assert events["record_failed"] == 1 and "the batch of version 0 could not be recorded (1 in a row)" in said[0]
        with pytest.raises(OSError, match="File too large"):
            own.flush()  # so no checkpoint counts on it
        own.batch(1, batch)
        with pytest.raises(RunFailed, match=r"3 batches in a row could not be recorded \(checkpoint\.max_failed_saves\)"):
            own.batch(2, batch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    own.batch(3, batch)
    own.close()
    found = [each.version for each in read_record(path) if isinstance(each, Recorded)]
    assert found == [0, 1, 2, 3], "what the disk did not take was kept"


def test_the_digest_of_a_model_changes_with_either_end_of_its_weights(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    weights.write_bytes(bytes(3 << 20))
    before = model_digest(str(tmp_path))
    for at in (0, (3 << 20) - 1):
        with weights.open("r+b") as file:
            file.seek(at)
            file.write(b"\1")
        assert model_digest(str(tmp_path)) != before
        before = model_digest(str(tmp_path))
    assert model_digest("org/name") == ""


def replayed(batches: list[tuple[int, list[Record]]], incarnation: int = 1, version: int = 0) -> ReplayLedger:
    ahead = iter([(at, records, 10 * k) for k, (at, records) in enumerate(batches, 1)])
    return ReplayLedger(make_rules(), incarnation, version, lambda: next(ahead, None))


def test_the_ledger_of_a_replay_takes_what_was_recorded_and_its_books_balance(tmp_path: Path) -> None:
    batches = [(0, taken(2)), (1, taken(1)), (1, taken(3))]
    ledger = replayed(batches)
    for skipped, (version, records) in zip((False, True, False), batches, strict=True):
        assert ledger.recorded == version
        assert ledger.take(version) == records
        assert ledger.books()["groups"]["taken"] == len(records)
        ids = [record.group_id for record in records]
        if skipped:
            ledger.drop(ids, "skipped")
        else:
            ledger.trained(ids, version + 1)
        assert ledger.books()["balanced"]
    assert ledger.recorded is None and ledger.position == 30
    nothing = dict.fromkeys(("waiting", "leased", "ready", "taken"), 0)
    assert ledger.books()["groups"] == nothing | {"granted": 6, "trained": 5, "dropped": {"skipped": 1}}
    state = msgpack.unpackb(msgpack.packb(ledger.state_dict(encode_group)) or b"")
    again = replayed([], 2, 2)
    again.load_state_dict(state, decode_group)
    assert again.books() == ledger.books()


def test_a_record_that_goes_on_from_another_version_is_never_taken(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"take\(0\): the next batch of the record was taken at version 1"):
        replayed([(1, taken())]).take(0)
    with pytest.raises(LedgerError, match="version None"):
        replayed([]).take(0)


def recorded_by(tmp_path: Path, config: Config) -> Order:
    """A record of one batch by a run with this configuration."""
    events: Counter[str] = Counter()
    own = Recorder(tmp_path, 0, life_of(config, "run", 1, 0), 3, events, print)
    own.batch(0, taken())
    own.close()
    return Order(tmp_path / RECORD / BATCHES, [])


def test_a_record_of_another_model_or_configuration_is_refused_in_one_sentence(tmp_path: Path) -> None:
    model = {"path": str(random_model(tmp_path / "model")), "max_model_len": 24}
    config = make_config(model=model)
    order = recorded_by(tmp_path, config)
    assert _check(config, order) == ("", 0)
    assert _check(make_config(model=model, learner={"ranks": 2}, checkpoint={"every": 1}), order) == ("", 0)
    faster = make_config(model=model, learner={"lr": 0.5})
    with pytest.raises(LearnerError, match=r"with another configuration \(learner\.lr 0\.001 -> 0\.5\): give the key"):
        _check(faster, order)
    assert _check(faster, order._replace(given=["learner.lr"])) == ("learner.lr 0.001 -> 0.5", 0)
    os.truncate(order.record, order.record.stat().st_size - 1)
    assert _check(config, order)[1] > 0, "the last batch was cut short"
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(LearnerError, match="was recorded with another model or tokenizer than"):
        _check(config, order)
