"""The discovery file: whole or absent, for its owner only."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from async_rl.transport.base import TransportError
from async_rl.transport.discovery import Discovery, read_discovery, write_discovery

FOUND = Discovery(control_address="tcp://127.0.0.1:5555", incarnation=3, run_id="r")


def test_what_is_written_is_read_and_only_the_owner_may(tmp_path: Path) -> None:
    path = tmp_path / "learner.json"
    write_discovery(path, FOUND)
    assert read_discovery(path) == FOUND
    assert path.stat().st_mode & 0o777 == 0o600
    write_discovery(path, {"control_address": "tcp://127.0.0.1:5", "incarnation": 4, "run_id": "r"})
    found = read_discovery(path)
    assert found is not None and found.incarnation == 4
    assert [p.name for p in tmp_path.iterdir()] == ["learner.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        FOUND.model_dump_json().encode()[:-5],
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"control_address": "tcp://127.0.0.1:5", "incarnation": -1, "run_id": "r"}',
        b'{"control_address": "tcp://127.0.0.1:5"}',
        b" " * 100_000 + FOUND.model_dump_json().encode(),
    ],
)
def test_a_half_written_or_wrong_file_reads_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "learner.json"
    path.write_bytes(content)
    assert read_discovery(path) is None


def test_no_file_and_a_folder_read_as_none(tmp_path: Path) -> None:
    assert read_discovery(tmp_path / "absent.json") is None
    assert read_discovery(tmp_path) is None


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"discovery file .*absent/learner.json cannot be written"):
        write_discovery(tmp_path / "absent" / "learner.json", FOUND)
    (tmp_path / "learner.json").mkdir()
    with pytest.raises(TransportError, match="cannot be written"):
        write_discovery(tmp_path / "learner.json", FOUND)
    assert [p.name for p in tmp_path.iterdir()] == ["learner.json"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "learner.json"
    write_discovery(path, FOUND)
    stop = threading.Event()

    def rewrite() -> None:
        for i in range(300):
            write_discovery(path, FOUND.model_copy(update={"incarnation": i, "run_id": "r" * (1 + 997 * i % 4000)}))
        stop.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not stop.is_set():
        assert read_discovery(path) is not None
    writer.join(10)
