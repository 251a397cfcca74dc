"""A learner's control plane with scripted rollouts: a hub that is a list, members that answer (or do not) in threads.

The weight group is real gloo on loopback; only sockets and engines are played.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from async_rl.config import Config, parse_config
from async_rl.data.ledger import Ledger
from async_rl.data.prompts import PromptStream
from async_rl.learner.control.dealer import Dealer
from async_rl.learner.control.members import Identity
from async_rl.learner.control.plane import ControlPlane
from async_rl.learner.control.publish import Publisher
from async_rl.learner.control.sizes import sizes_of
from async_rl.transport.base import Delivered, Event, Peer, Said
from async_rl.transport.messages import (
    PROTOCOL,
    Commit,
    Committed,
    Error,
    Heartbeat,
    Hello,
    Lease,
    Message,
    Prepare,
    Prepared,
    Staged,
    Welcome,
)
from async_rl.types import Attempt, Group
from async_rl.weights.base import WeightsError
from async_rl.weights.group import GroupSpec, WeightGroup
from async_rl.weights.manifest import Manifest
from async_rl.weights.receiver import Receiver
from async_rl.weights.source import WeightSource
from tests.ledger_samples import make_prompt, make_rules, make_trajectory

IDENTITY = Identity("run", "config", "tokenizer", incarnation=1)


class ListHub:
    """Messages in by `say` and `deliver`, out by `send`, in order."""

    control_address = data_address = "list://"
    disconnects = 0

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self._events: list[Event] = []
        self._woken = threading.Event()
        self.listeners: dict[Peer, Callable[[Message], None]] = {}

    def poll(self, timeout_s: float) -> list[Event]:
        self._woken.wait(timeout_s)
        self._woken.clear()
        events, self._events = self._events, []
        return events

    def send(self, peer: Peer, message: Message) -> bool:
        listener = self.listeners.get(peer)
        if listener is not None:
            listener(message)
        return listener is not None

    def say(self, peer: Peer, message: Message) -> None:
        self._events.append(Said(peer, message))
        self._woken.set()

    def deliver(self, group: Group) -> None:
        self._events.append(Delivered(group, 50))
        self._woken.set()

    def wake(self) -> None:
        self._woken.set()

    def close(self, linger_s: float) -> None:
        self.listeners.clear()


def make_config(**changes: Any) -> Config:
    tree: dict[str, Any] = {
        "num_steps": 10,
        "groups_per_step": 2,
        "group_size": 2,
        "max_staleness": 1,
        "model": {"path": "none", "max_model_len": 32},
        "rollout": {"max_new_tokens": 8, "num_slots": 8, "timeout_s": 1.0, "start_timeout_s": 1.0},
        "transport": {"heartbeat_s": 0.1, "heartbeat_timeout_s": 1.0},
        "weights": {"phase_timeout_s": 2.0, "bucket_bytes": 4096},
    }
    for key, value in changes.items():
        tree[key] = {**tree[key], **value} if isinstance(value, dict) and key in tree else value
    return parse_config(tree)


@dataclass
class Scene:
    """Control plane, publisher and a trainer that hands over buckets, as rank 0 has them."""

    config: Config = field(default_factory=make_config)
    before_bucket: Callable[[int], None] = lambda k: None  # called by the trainer before it hands over bucket k

    def __post_init__(self) -> None:
        self.hub = ListHub()
        self.notices: list[str] = []
        self.weights = [("w", torch.arange(3000, dtype=torch.float32)), ("b", torch.ones(7))]
        self.source = WeightSource(self.weights, torch.float32, self.config.weights.bucket_bytes)
        prompts = PromptStream([make_prompt(i) for i in range(50)], seed=0)
        dealer = Dealer(prompts, sizes_of(self.config), self.config.algorithm.has_greedy)
        rules = make_rules(groups_per_step=2, max_staleness=1, num_steps=10, max_group_bytes=self.config.max_group_bytes)
        self.ledger = Ledger(rules, 1, 0)
        self.control = ControlPlane(self.config, self.hub, self.ledger, dealer, IDENTITY, 0, 1000, self.notices.append)
        self.publisher = Publisher(self.control, self.source, "gloo", 0)
        self._closed = threading.Event()
        self._trainer = threading.Thread(target=self._hand_over, daemon=True)

    def __enter__(self) -> Scene:
        self.control.start()
        self.publisher.start()
        self._trainer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._trainer.join(5)
        self.publisher.close()
        self.control.close("the test is over", 0.0)

    def _hand_over(self) -> None:
        while not self._closed.is_set():
            k = self.publisher.port.wanted
            if k is None:
                time.sleep(0.005)
                continue
            self.before_bucket(k)
            bucket = self.source.gather(k)
            assert bucket is not None
            self.publisher.port.put(bucket)

    def until(self, what: str, ready: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self.control.changed:
                if result := ready():
                    return result
            assert self.control.failure is None, self.control.failure
            time.sleep(0.01)
        raise AssertionError(f"no {what} within {timeout_s} s; notices: {self.notices}")


class RemoteReceiver:
    """A Receiver in a process of its own, which a test can kill."""

    def __init__(self, spec: GroupSpec, manifest: Manifest) -> None:
        context = multiprocessing.get_context("forkserver")  # a plain fork would hold the learner's sockets open
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve_receiver, args=(theirs, spec, manifest.to_dict()), daemon=True)
        self.process.start()
        theirs.close()

    def post(self) -> None:
        self._ask("post")

    def wait(self, timeout_s: float) -> list[str]:
        return self._ask("wait", timeout_s)

    def arrived(self) -> list[str] | None:
        return self._ask("arrived")

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, torch.from_numpy(values)) for name, values in self._ask("tensors")]

    @property
    def checksum(self) -> str:
        return self._ask("checksum")

    def _ask(self, what: str, *args: Any) -> Any:
        self._pipe.send((what, args))
        answer = self._pipe.recv()
        if isinstance(answer, WeightsError):
            raise answer
        return answer


def _serve_receiver(pipe: Any, spec: GroupSpec, manifest: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    receiver = Receiver(spec, Manifest.from_dict(manifest))
    with contextlib.suppress(EOFError):
        while True:
            what, args = pipe.recv()
            try:
                answer: Any = getattr(receiver, what)
                answer = answer(*args) if callable(answer) else answer
                pipe.send([(name, tensor.numpy()) for name, tensor in answer] if what == "tensors" else answer)
            except WeightsError as e:
                pipe.send(WeightsError(str(e)))


class Rollout:
    """A member that does what a good one does, unless told to be silent or to fail in a phase."""

    def __init__(
        self,
        scene: Scene,
        name: str,
        *,
        silent_at: str = "",
        beats: bool = False,
        checksum: str = "",
        peer: str = "",
        receiver: type[Receiver] | type[RemoteReceiver] = Receiver,
        **hello: Any,
    ) -> None:
        """`beats`: in the phase in which it is silent it still sends heartbeats. `peer`: of its connection; its name.
        `silent_at` "broken": it leaves every group as soon as it is formed."""
        self.scene, self.name, self.peer = scene, name, (peer or name).encode()
        self.silent_at, self.beats, self.checksum, self.receiver = silent_at, beats, checksum, receiver
        self.rollout_id = ""
        self.leases: list[Lease] = []
        self.messages: list[Message] = []
        self.received: dict[str, torch.Tensor] = {}
        self._receiver: Receiver | RemoteReceiver | None = None
        self._prepared: Prepare | None = None
        self._joining = threading.Lock()
        self._alive = threading.Event()
        self._alive.set()
        scene.hub.listeners[self.peer] = self._hear
        values = {
            "protocol": PROTOCOL,
            "run_id": "run",
            "config_digest": "config",
            "tokenizer_digest": "tokenizer",
            "name": name,
            "num_slots": 8,
        }
        self.hello = Hello(**(values | hello))
        self.say(self.hello)
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, message: Message) -> None:
        self.scene.hub.say(self.peer, message)

    def kill(self) -> None:
        """The process that receives its weights dies at once, and it is not heard of again."""
        assert isinstance(self._receiver, RemoteReceiver)
        self._alive.clear()
        self._receiver.process.kill()

    def freeze(self) -> None:
        if not self.beats:
            self._alive.clear()

    def deliver(self, lease: Lease, versions: list[int], rewards: tuple[float, ...] = (0.0, 1.0)) -> None:
        siblings = tuple(dataclasses.replace(make_trajectory(versions), reward=reward) for reward in rewards)
        ids = np.array(lease.prompt_ids, np.int32)
        group = Group(lease.group_id, Attempt(*lease.attempt), lease.split, self.rollout_id, ids, siblings)
        self.scene.hub.deliver(group)

    def _beat(self) -> None:
        while self.peer in self.scene.hub.listeners and self._alive.is_set():
            if self.rollout_id:
                self.say(Heartbeat())
            time.sleep(0.1)

    def _hear(self, message: Message) -> None:
        self.messages.append(message)
        if not self._alive.is_set():
            return
        match message:
            case Welcome():
                self.rollout_id = message.rollout_id
            case Lease():
                self.leases.append(message)
            case Prepare():
                threading.Thread(target=self._receive, args=(message,), daemon=True).start()
            case Commit():
                threading.Thread(target=self._commit, args=(message,), daemon=True).start()
            case _:
                pass

    def _receive(self, p: Prepare) -> None:
        if self.silent_at == "prepared":
            self.freeze()
            return
        if self.silent_at == "broken":
            spec = GroupSpec(p.backend, p.host, p.port, p.tag, p.rank, p.world_size, p.membership, p.timeout_s)
            self.say(Prepared(membership=p.membership, version=p.version))
            with contextlib.suppress(WeightsError):
                WeightGroup(spec).close()
            return
        try:
            with self._joining:
                if self._prepared is not None and self._prepared.membership > p.membership:
                    return  # superseded while it waited here
                if self._receiver is None or self._prepared is None or self._prepared.membership != p.membership:
                    spec = GroupSpec(p.backend, p.host, p.port, p.tag, p.rank, p.world_size, p.membership, p.timeout_s)
                    self._receiver = self.receiver(spec, Manifest.from_dict(p.manifest))
                self._prepared, receiver = p, self._receiver
                receiver.post()
            self.say(Prepared(membership=p.membership, version=p.version))
            receiver.wait(30)
        except Exception as e:
            if self._alive.is_set():
                self.say(Error(code="weights", text=str(e), membership=p.membership))
            return
        if self.silent_at == "staged":
            self.freeze()
            return
        self.say(Staged(membership=p.membership, version=p.version))

    def _commit(self, c: Commit) -> None:
        if self.silent_at == "committed":
            self.freeze()
            return
        assert self._receiver is not None
        assert self._receiver.arrived() == c.bucket_digests
        self.received = {name: tensor.clone() for name, tensor in self._receiver.tensors()}
        checksum = self.checksum or self._receiver.checksum
        self.say(Committed(membership=c.membership, version=c.version, checksum=checksum))
