"""Who connects to the ports of a weight group without the tag neither breaks nor joins it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.weights.base import WeightsError
from async_rl.weights.group import GroupSpec, Listener, WeightGroup, listen

HOST = "127.0.0.1"
TAG = "5e1f0a"


def spec(port: int, rank: int, timeout_s: float = 30.0) -> GroupSpec:
    return GroupSpec("gloo", HOST, port, TAG, rank, 2, 1, timeout_s)


def form(listener: Listener, port: int, while_forming) -> tuple[WeightGroup, WeightGroup]:
    """Both members of a group, the second of which comes when `while_forming` is done."""
    with ThreadPoolExecutor(2) as pool:
        root = pool.submit(WeightGroup, spec(port, 0), listener)
        while_forming()
        member = pool.submit(WeightGroup, spec(port, 1))
        return root.result(60), member.result(60)


def assert_works(root: WeightGroup, member: WeightGroup) -> None:
    sent, got = torch.arange(200, dtype=torch.uint8), torch.zeros(200, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(member.broadcast, got)
        root.broadcast(sent)
        receiving.result(60)
    assert torch.equal(sent, got)
    member.close()
    root.close()


@contextlib.contextmanager
def crowd(port: int, words: list[bytes]):
    """Connections to the port, one for each of the words, that stay open."""
    held = [socket.create_connection((HOST, port), timeout=10) for _ in words]
    for made, said in zip(held, words, strict=True):
        with contextlib.suppress(OSError):
            made.sendall(said)
    yield
    for made in held:
        made.close()


def test_garbage_at_the_store_while_a_group_forms_changes_nothing() -> None:
    listener, port = listen(HOST)
    words = [os.urandom(n) for n in (1, 8, 64, 4096)] * 8 + [bytes(64), b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n"] * 8
    words += [bytes([command]) + b"\xff" * 16 for command in range(32)] + [b""] * 50
    with crowd(port, words):
        assert_works(*form(listener, port, lambda: time.sleep(0.5)))


def test_keys_without_the_tag_change_nothing() -> None:
    listener, port = listen(HOST)

    def set_keys() -> None:
        stranger = TCPStore(HOST, port, world_size=None, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False)
        named = PrefixStore("another", stranger)
        for store in (stranger, named):
            for key in ("here/0", "here/1", "0", "1", "rank_0", "rank_1", "0/1", "1/0", "cpu/0", "device"):
                store.set(key, "nonsense")

    assert_works(*form(listener, port, set_keys))


def _listening() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def test_a_store_is_open_only_while_it_is_somebodys() -> None:
    listener, port = listen(HOST)
    assert port in _listening()
    listener.close()
    deadline = time.monotonic() + 20
    while port in _listening():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_who_takes_a_members_place_at_the_store_stalls_it_for_the_deadline_and_no_longer() -> None:
    """With the tag, which only members are told. Whoever did come is not named as absent."""
    listener, port = listen(HOST)
    failed: list[WeightsError] = []

    def root() -> None:
        try:
            WeightGroup(spec(port, 0, timeout_s=4.0), listener).close()
        except WeightsError as e:
            failed.append(e)

    forming = threading.Thread(target=root)
    started = time.monotonic()
    forming.start()
    stranger = TCPStore(HOST, port, world_size=None, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False)
    PrefixStore(TAG, stranger).set("here/1", "1")
    forming.join(60)
    assert failed and failed[0].absent == () and "failed within 4 s" in str(failed[0])
    assert time.monotonic() - started < 40
    del stranger
    listener, port = listen(HOST)
    assert_works(*form(listener, port, lambda: None))


@pytest.mark.parametrize("words", [b"", os.urandom(64), bytes(8), bytes(64)])
def test_garbage_at_the_members_own_ports_changes_nothing(words: bytes) -> None:
    listener, port = listen(HOST)
    before = _listening()
    spoken: list[int] = []

    def speak() -> None:
        deadline = time.monotonic() + 20
        while not (new := _listening() - before) and time.monotonic() < deadline:
            time.sleep(0.01)
        for found in new:
            with crowd(found, [words] * 4):
                spoken.append(found)

    assert_works(*form(listener, port, speak))
    assert spoken, "the root listens for its member while the group forms"
