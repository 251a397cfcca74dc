"""Keys: who has none that is known ends at the handshake, counted, and costs the learner little."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.auth import create_certificates

from async_rl.config import ConfigError, parse_config
from async_rl.launcher.preflight import check_keys
from async_rl.transport import admission
from async_rl.transport.base import Delivered, Said
from async_rl.transport.keys import RolloutKeys, make_keys, read_learner_keys, read_rollout_keys
from async_rl.transport.messages import Heartbeat
from async_rl.transport.zmq import ZmqHub, ZmqLink

from .transport_samples import MAX_BYTES, make_group, make_hub, poll_until

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def hub(folder: Path) -> Iterator[ZmqHub]:
    made = make_hub(keys=read_learner_keys(folder))
    yield made
    made.close(0)


async def _knock(address: str, data: str, keys: RolloutKeys | None, within_s: float) -> str:
    """The phase of the learner's answer to a heartbeat, after a group was pushed; "" when there is none in time."""
    link = ZmqLink(address, max_message_bytes=MAX_BYTES, keys=keys)
    link.open_data(data)
    try:
        async with asyncio.timeout(within_s):
            await link.send(Heartbeat(phase="knock"))
            answer = await link.recv()
            await link.push(make_group(4242))
            assert isinstance(answer, Heartbeat)
            return answer.phase
    except TimeoutError:
        return ""
    finally:
        link.close(2)


async def _say(address: str, data: str, keys: RolloutKeys | None, within_s: float) -> str:
    """The same over new connections, as a rollout knocks: one that is shut takes what it carried with it."""
    answer, until = "", time.monotonic() + within_s
    while not answer and time.monotonic() < until:
        answer = await _knock(address, data, keys, min(5.0, within_s))
    return answer


def visit(hub: ZmqHub, keys: RolloutKeys | None, within_s: float = 20.0) -> bool:
    """Whether a rollout with these keys is heard and answered, and its group taken."""
    answers: list[str] = []
    address, data = hub.control_address, hub.data_address
    visitor = threading.Thread(target=lambda: answers.append(asyncio.run(_say(address, data, keys, within_s))))
    visitor.start()
    delivered = False
    until = time.monotonic() + within_s + 5
    while time.monotonic() < until and (visitor.is_alive() or (answers[0] and not delivered)):
        for event in hub.poll(0.05):
            if isinstance(event, Said):
                hub.send(event.peer, Heartbeat(phase="welcome"))
            delivered |= isinstance(event, Delivered)
    visitor.join(10)
    return answers == ["welcome"] and delivered


def stranger_options(folder: Path) -> dict[str, dict[int, Any]]:
    """What each kind of stranger sets on his socket."""
    own = read_rollout_keys(folder)
    public, secret = zmq.curve_keypair()
    return {
        "no mechanism": {},
        "PLAIN": {zmq.PLAIN_USERNAME: b"rollout", zmq.PLAIN_PASSWORD: b"rollout"},
        "unknown client key": {
            zmq.CURVE_SERVERKEY: own.learner, zmq.CURVE_PUBLICKEY: public, zmq.CURVE_SECRETKEY: secret,
        },
        "wrong server key": {
            zmq.CURVE_SERVERKEY: public, zmq.CURVE_PUBLICKEY: own.own.public, zmq.CURVE_SECRETKEY: own.own.secret,
        },
        "a known public key without its secret": {
            zmq.CURVE_SERVERKEY: own.learner, zmq.CURVE_PUBLICKEY: own.own.public, zmq.CURVE_SECRETKEY: secret,
        },
    }  # fmt: skip


def test_a_rollout_with_a_known_key_gets_in_and_nobody_else_past_the_handshake(folder: Path, hub: ZmqHub) -> None:
    context = zmq.Context()
    for kind, options in stranger_options(folder).items():
        for channel, address in ((zmq.DEALER, hub.control_address), (zmq.PUSH, hub.data_address)):
            before = sum(hub.refused.values())
            made = context.socket(channel)
            made.setsockopt(zmq.RECONNECT_IVL, -1)
            for option, value in options.items():
                made.setsockopt(option, value)
            made.connect(address)
            made.send(b"\xc1" * 9)
            events = poll_until(hub, lambda events, n=before: sum(hub.refused.values()) > n)
            assert events == [], kind
            made.close(0)
    context.term()
    # Who notices first that the other has no such mechanism leaves, and is counted as one that left.
    assert set(hub.refused) <= {"handshake", "handshake_auth"}, "nothing of what they sent was ever looked at"
    assert hub.refused["handshake_auth"] >= 6
    assert visit(hub, read_rollout_keys(folder))


def test_without_a_zap_handler_nobody_is_let_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of creation is what keys stand on: were it wrong, ZeroMQ would refuse all, not admit all."""
    monkeypatch.setattr(admission, "_ZAP", "inproc://somewhere-else")
    hub = make_hub(keys=read_learner_keys(folder))
    try:
        assert not visit(hub, read_rollout_keys(folder), within_s=2.0)
    finally:
        hub.close(0)


def test_keys_that_are_added_or_removed_count_for_the_next_connection(
    folder: Path, hub: ZmqHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.transport.keys.REREAD_S", 0.0)
    make_keys(tmp_path / "other")
    other = RolloutKeys(read_rollout_keys(tmp_path / "other").own, read_rollout_keys(folder).learner)
    assert not visit(hub, other, within_s=1.5)
    (folder / "rollouts" / "other.key").write_bytes((tmp_path / "other" / "rollout.key").read_bytes())
    (folder / "rollouts" / "damaged.key").write_text("nothing")
    assert visit(hub, other)
    (folder / "rollouts" / "other.key").unlink()
    assert not visit(hub, other, within_s=1.5)
    assert visit(hub, read_rollout_keys(folder))


def test_a_key_folder_is_private_and_never_written_over(tmp_path: Path) -> None:
    make_keys(tmp_path / "new" / "keys")
    made = {str(p.relative_to(tmp_path / "new")): p.stat().st_mode & 0o777 for p in (tmp_path / "new").rglob("*")}
    assert made["keys"] == made["keys/rollouts"] == 0o700
    assert made["keys/learner.key_secret"] == made["keys/rollout.key_secret"] == 0o600
    assert len(made) == 7
    before = (tmp_path / "new" / "keys" / "learner.key").read_bytes()
    with pytest.raises(ConfigError, match="exists, and keys are never written over"):
        make_keys(tmp_path / "new" / "keys")
    assert (tmp_path / "new" / "keys" / "learner.key").read_bytes() == before


def _swap(folder: Path) -> None:
    create_certificates(folder, "learner")
    (folder / "learner.key_secret").chmod(0o600)
    create_certificates(folder, "rollout")
    (folder / "rollout.key_secret").chmod(0o600)


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("gone")), r"needs .*keys, which cannot be read .*`async-rl keys DIR`"),
    "open folder": (lambda f: f.chmod(0o755), r"keys has mode 0755, .*chmod go-rwx .*keys$"),
    "open secret": (lambda f: (f / "learner.key_secret").chmod(0o640), r"learner\.key_secret has mode 0640"),
    "no secret": (lambda f: (f / "rollout.key_secret").unlink(), r"rollout\.key_secret, which cannot be read"),
    "no learner": (lambda f: (f / "learner.key").unlink(), r"learner\.key is missing"),
    "damaged secret": (lambda f: (f / "learner.key_secret").write_text("x"), r"learner\.key_secret cannot be used"),
    "a public key for a secret": (
        lambda f: (f / "learner.key_secret").write_bytes((f / "learner.key").read_bytes()), r"its keys are no pair",
    ),
    "damaged public": (lambda f: (f / "learner.key").write_text('public-key = "abc"'), r"learner\.key is damaged"),
    "nobody known": (lambda f: (f / "rollouts" / "rollout.key").unlink(), r"rollouts/ holds no \*\.key"),
    "no list": (lambda f: (f / "rollouts").rename(f / "old"), r"rollouts with the public keys of rollouts, which cannot"),
    "known is damaged": (lambda f: (f / "rollouts" / "x.key").write_text("curve"), r"x\.key cannot be used"),
    "others' keys": (_swap, r"rollouts/ does not hold rollout\.key"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_with_a_key_folder_is_one_sentence(folder: Path, mistake: str) -> None:
    tree = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, "model": {"path": "somewhere"}}
    config = parse_config({**tree, "transport": {"keys": str(folder), "host": "192.0.2.1"}})
    check_keys(config)
    spoil, sentence = MISTAKES[mistake]
    spoil(folder)
    with pytest.raises(ConfigError, match=sentence) as raised:
        check_keys(config)
    assert "\n" not in str(raised.value)


def test_where_the_keys_lie_is_no_part_of_what_learner_and_rollouts_agree_on() -> None:
    tree: dict[str, Any] = {"num_steps": 4, "groups_per_step": 2, "group_size": 2, "model": {"path": "somewhere"}}
    here, there = (parse_config({**tree, "transport": {"keys": keys}}).digest() for keys in ("/here", None))
    assert here == there


SERVE = """
import json, os, resource, sys, time
from pathlib import Path
from async_rl.transport.base import Said
from async_rl.transport.keys import read_learner_keys
from async_rl.transport.messages import Heartbeat
from async_rl.transport.zmq import ZmqHub

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

folder, limit, stop = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limit), limit))
keys = read_learner_keys(Path(folder)) if folder else None
hub = ZmqHub("127.0.0.1", 0, max_message_bytes=64 << 20, max_frame_bytes=1 << 20, keys=keys)
print(json.dumps([hub.control_address, hub.data_address]), flush=True)
before, most_bytes, most_files = rss(), 0, 0
while not stop.exists():
    for event in hub.poll(0.02):
        if isinstance(event, Said):
            hub.send(event.peer, Heartbeat(phase="welcome"))
    most_bytes = max(most_bytes, rss())
    most_files = max(most_files, len(os.listdir("/proc/self/fd")))
started = time.monotonic()
hub.close(0)
closing_s = time.monotonic() - started
grown = (most_bytes - before) >> 20
print(json.dumps({"refused": hub.refused, "grown_mib": grown, "files": most_files, "closing_s": closing_s}), flush=True)
"""


@contextmanager
def serving(tmp_path: Path, keys: Path | None, limit: int) -> Iterator[tuple[subprocess.Popen[str], list[str], Path]]:
    stop = tmp_path / "stop"
    argv = [sys.executable, "-c", SERVE, str(keys or ""), str(limit), str(stop)]
    popen = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert popen.stdout is not None
        yield popen, json.loads(popen.stdout.readline()), stop
    finally:
        if popen.poll() is None:
            popen.kill()
            popen.wait(10)


def strangers(kind: str, address: str, count: int, seconds: float) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tests.strangers", kind, address, str(count), str(seconds)]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "reason", "with_keys"),
    [
        ("idle", "handshake", True),
        ("half", "handshake", True),
        ("half_null", "handshake", False),
        ("header", "handshake_protocol", True),
        ("large", "handshake", True),
        ("random", "handshake", False),
    ],
)
def test_thousands_of_strangers_cost_little_and_keep_no_rollout_out(
    tmp_path: Path, folder: Path, kind: str, reason: str, with_keys: bool
) -> None:
    keys = read_rollout_keys(folder) if with_keys else None
    with serving(tmp_path, folder if with_keys else None, 20_000) as (popen, addresses, stop):
        crowds = [strangers(kind, address, 2000, 8.0) for address in addresses]
        time.sleep(2.0)
        assert asyncio.run(_say(addresses[0], addresses[1], keys, 40.0)) == "welcome"
        connected = [int(crowd.communicate(timeout=60)[0]) for crowd in crowds]
        stop.touch()
        assert popen.stdout is not None
        said = json.loads(popen.stdout.readline())
    assert max(connected) > 500, "else nothing was tried"
    assert said["grown_mib"] <= 64
    assert said["files"] <= 2 * (admission.MAX_CONNECTIONS + admission.EVENTS_QUEUE) + 64
    assert said["refused"].get(reason, 0) + said["refused"].get("crowded", 0) > 1000
    assert said["refused"].get(reason, 0) > 100
    assert said["closing_s"] < 5


@pytest.mark.process
def test_few_descriptors_bound_the_connections_and_the_learner_lives(tmp_path: Path, folder: Path) -> None:
    limit = 3000
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < limit:
        pytest.skip("the hard limit of descriptors is lower than the one tried")
    with serving(tmp_path, folder, limit) as (popen, addresses, stop):
        crowds = [strangers("idle", address, 2500, 6.0) for address in addresses]
        connected = [int(crowd.communicate(timeout=60)[0]) for crowd in crowds]
        assert asyncio.run(_say(addresses[0], addresses[1], read_rollout_keys(folder), 40.0)) == "welcome"
        stop.touch()
        assert popen.stdout is not None
        said = json.loads(popen.stdout.readline())
    assert max(connected) > 500, "else nothing was tried"
    assert said["files"] <= limit - 100, "files can be opened all the time"
    assert said["refused"]["crowded"] > 0


def test_a_descriptor_that_is_no_connection_any_more_is_left_as_it_is(tmp_path: Path) -> None:
    """By the time an event is read its number may be a file's, a pipe's, or another socket's."""
    ours, theirs = socket.socketpair()
    others = [socket.socket(kind) for kind in (socket.AF_INET, socket.AF_INET6)]
    with (tmp_path / "file").open("wb") as file, ours, theirs, others[0], others[1]:
        before = len(os.listdir("/proc/self/fd"))
        for number in (file.fileno(), ours.fileno(), *(each.fileno() for each in others), 9999):
            for endpoint in (b"tcp://127.0.0.1:5", b"tcp://[::1]:5", b""):
                admission._shut(number, endpoint)
        assert len(os.listdir("/proc/self/fd")) == before
        file.write(b"still open")
        ours.send(b"x")
        assert theirs.recv(1) == b"x"


def test_a_hub_that_nobody_polled_during_a_crowd_closes_at_once(folder: Path) -> None:
    """ZeroMQ's thread then waits for room for its events, with a lock in hand that closing needs."""
    hub = make_hub(keys=read_learner_keys(folder))
    crowd = strangers("random", hub.control_address, 3000, 4.0)
    crowd.communicate(timeout=60)
    closing = threading.Thread(target=hub.close, args=(0.0,), daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
