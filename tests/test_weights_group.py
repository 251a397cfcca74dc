"""The private group and the receiver, over real loopback sockets: bits arrive, and silence ends in a sentence."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from async_rl.weights.base import WeightsError
from async_rl.weights.checksum import digest
from async_rl.weights.group import GroupSpec, WeightGroup, listen
from async_rl.weights.receiver import Receiver
from async_rl.weights.source import WeightSource

HOST = "127.0.0.1"


def spec(port: int, rank: int, world_size: int = 2, membership: int = 1, timeout_s: float = 20.0) -> GroupSpec:
    return GroupSpec("gloo", HOST, port, f"tag{membership}", rank, world_size, membership, timeout_s)


def send(source: WeightSource, group: WeightGroup) -> list[str]:
    digests = []
    for k in range(len(source.manifest.buckets)):
        bucket = source.gather(k)
        assert bucket is not None
        group.broadcast(bucket)
        digests.append(digest(bucket))
    return digests


def source_of(seed: int, bucket_bytes: int = 4096) -> tuple[dict[str, torch.Tensor], WeightSource]:
    generator = torch.Generator().manual_seed(seed)
    named = {
        "w": torch.randn(50, 41, generator=generator),
        "half": torch.randn(77, generator=generator).bfloat16(),
        "ids": torch.randint(0, 9, (5,), generator=generator),
        "f8": torch.randn(30, generator=generator).to(torch.float8_e5m2),
    }
    return named, WeightSource(list(named.items()), torch.float32, bucket_bytes)


def test_two_receivers_hold_the_senders_bits_version_after_version():
    listener, port = listen(HOST)
    _, first = source_of(0)
    receivers = [Receiver(spec(port, rank, 3), first.manifest) for rank in (1, 2)]
    for receiver in receivers:
        receiver.post()
    group = WeightGroup(spec(port, 0, 3), listener)
    for version in range(3):
        named, source = source_of(version)
        if version:
            for receiver in receivers:
                receiver.post()
        digests = send(source, group)
        for receiver in receivers:
            assert receiver.wait(20) == digests
            assert receiver.checksum == source.checksum()
            got = dict(receiver.tensors())
            for name, tensor in named.items():
                sent = tensor.float() if tensor.is_floating_point() else tensor
                assert torch.equal(got[name], sent), name
    for receiver in receivers:
        receiver.close()
    group.close()


def test_the_default_group_stays_untouched_and_the_port_and_threads_are_freed():
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    listener, port = listen(HOST)
    with ThreadPoolExecutor(1) as pool:
        member = pool.submit(WeightGroup, spec(port, 1))
        root = WeightGroup(spec(port, 0), listener)
        group = member.result(20)
        assert not dist.is_initialized()
        assert threads() > before
        group.close()
        root.close()
        del member, group
    root.close()
    deadline = time.monotonic() + 10
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threads() <= before
    with socket.socket() as again:
        again.bind((HOST, port))


def test_every_listener_is_on_the_given_interface():
    listener, port = listen("127.0.0.2")
    with ThreadPoolExecutor(1) as pool:
        local = [GroupSpec("gloo", "127.0.0.2", port, "t", rank, 2, 1, 20.0) for rank in range(2)]
        member = pool.submit(WeightGroup, local[1])
        root = WeightGroup(local[0], listener)
        group = member.result(20)
        inodes = {
            os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")
        }
        listening = []
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with open(table) as file:
                rows = [row.split() for row in file.readlines()[1:]]
            listening += [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
        assert listening and set(listening) <= {"0200007F", "0100007F"}  # 127.0.0.2, and 127.0.0.1 on the member's way to it
        group.close()
        root.close()


def test_a_group_that_never_fills_ends_in_a_sentence_that_names_the_membership():
    listener, port = listen(HOST)
    start = time.monotonic()
    with pytest.raises(WeightsError, match="forming the weight group of membership 7 "):
        WeightGroup(spec(port, 0, membership=7, timeout_s=1.0), listener)
    assert time.monotonic() - start < 5
    with socket.socket() as again:
        again.bind((HOST, port))


def test_a_member_waits_no_longer_than_its_deadline_for_a_learner_that_listens_and_never_forms_the_group():
    listener, port = listen(HOST)
    start = time.monotonic()
    with pytest.raises(WeightsError, match="forming the weight group of membership 7 "):
        WeightGroup(spec(port, 1, membership=7, timeout_s=1.0))
    assert time.monotonic() - start < 5
    listener.close()
    with socket.socket() as again:
        again.bind((HOST, port))


def test_a_silent_sender_ends_in_a_sentence_and_a_new_membership_works():
    _, source = source_of(0)
    listener, port = listen(HOST)
    receiver = Receiver(spec(port, 1, timeout_s=1.0), source.manifest)
    receiver.post()
    silent = WeightGroup(spec(port, 0, timeout_s=1.0), listener)
    with pytest.raises(WeightsError, match=r"have not arrived within 0\.1 s"):
        receiver.wait(0.1)
    with pytest.raises(WeightsError, match="cannot receive now"):
        receiver.post()
    with pytest.raises(WeightsError, match=r"broadcast of .* in membership 1 "):
        receiver.wait(10)
    with pytest.raises(WeightsError):
        receiver.tensors()
    receiver.close()
    silent.close()

    listener, port = listen(HOST)
    receiver = Receiver(spec(port, 1, membership=2), source.manifest)
    receiver.post()
    group = WeightGroup(spec(port, 0, membership=2), listener)
    assert send(source, group) == receiver.wait(20)
    receiver.close()
    group.close()


def test_leaving_while_weights_arrive_frees_the_memory_and_the_thread():
    _, source = source_of(0)
    listener, port = listen(HOST)
    receiver = Receiver(spec(port, 1, timeout_s=1.0), source.manifest)
    receiver.post()
    silent = WeightGroup(spec(port, 0, timeout_s=1.0), listener)
    receiver.close()
    deadline = time.monotonic() + 10
    while any(t.name == "weights-1" for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(t.name == "weights-1" for t in threading.enumerate())
    assert receiver._staging is None and receiver._group is None
    silent.close()


def join_and_wait(member: GroupSpec, joined) -> None:
    group = WeightGroup(member)
    joined.set()
    group.broadcast(torch.empty(64 << 20, dtype=torch.uint8))


def test_a_frozen_member_makes_the_broadcast_fail_within_its_deadline():
    listener, port = listen(HOST)
    context = multiprocessing.get_context("fork")
    joined = context.Event()
    member = context.Process(target=join_and_wait, args=(spec(port, 1, timeout_s=2.0), joined))
    member.start()
    try:
        group = WeightGroup(spec(port, 0, timeout_s=2.0), listener)
        assert joined.wait(20) and member.pid
        os.kill(member.pid, signal.SIGSTOP)
        while "T (stopped)" not in Path(f"/proc/{member.pid}/status").read_text():
            time.sleep(0.01)
        start = time.monotonic()
        with pytest.raises(WeightsError, match=r"broadcast of 67108864 bytes in membership 1 .* within 2 s"):
            group.broadcast(torch.zeros(64 << 20, dtype=torch.uint8))
        assert time.monotonic() - start < 8
        group.close()
    finally:
        member.kill()
        member.join(10)
