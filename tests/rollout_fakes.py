"""A learner that speaks the protocol and does what a test tells it to, and a worker over memory for it to talk to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from async_rl.config import Config, parse_config
from async_rl.envs.base import Scored
from async_rl.envs.single_turn import SingleTurn
from async_rl.rollout.join import Door
from async_rl.rollout.scheduler import Sampler
from async_rl.rollout.toy_engine import Script, ToyEngine
from async_rl.rollout.worker import Worker
from async_rl.transport.base import Delivered, Hub, Peer
from async_rl.transport.discovery import write_discovery
from async_rl.transport.memory import MemoryHub, MemoryLink
from async_rl.transport.messages import (
    PROTOCOL,
    Ack,
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
from async_rl.types import Group, Prompt
from async_rl.weights.checksum import digest
from async_rl.weights.group import GroupSpec, WeightGroup, listen
from async_rl.weights.source import WeightSource

M = TypeVar("M", bound=Message)
PHASE_S = 2.0


def settings(**transport: float) -> Config:
    times = {"heartbeat_s": 0.05, "heartbeat_timeout_s": 0.6, "connect_timeout_s": 3.0}
    return parse_config(
        {
            "num_steps": 1,
            "groups_per_step": 1,
            "group_size": 2,
            "model": {"path": "none", "max_model_len": 1024},
            "rollout": {"engine": "toy", "num_slots": 4, "max_new_tokens": 500},
            "transport": times | transport,
            "weights": {"phase_timeout_s": PHASE_S},
        }
    )


def parameters() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"embed.weight": torch.randn(50, 8), "norm.weight": torch.randn(8), "head.weight": torch.randn(50, 8)}


class Learner:
    """Answers Hello, acknowledges groups, beats, and does what a test tells it to."""

    def __init__(self, path: Path, hub: Hub, incarnation: int = 1, beat: bool = True, ack: bool = True) -> None:
        self.path, self.hub, self.incarnation, self.beating, self.acking = path, hub, incarnation, beat, ack
        self.said: list[Message] = []
        self.groups: list[Group] = []
        self.peers: list[Peer] = []
        self.refusal: Error | None = None
        self.membership = 0
        self.source = WeightSource(list(parameters().items()), torch.float32, 1024)
        self.group: WeightGroup | None = None
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        write_discovery(
            self.path, {"control_address": self.hub.control_address, "incarnation": self.incarnation, "run_id": "run"}
        )
        beat = 0.0
        while True:
            if self.beating and time.monotonic() > beat:
                beat = time.monotonic() + 0.1
                for peer in self.peers[-1:]:
                    self.hub.send(peer, Heartbeat())
            for event in self.hub.poll(0.0):
                if isinstance(event, Delivered):
                    self.groups.append(event.group)
                    if self.acking:
                        self.ack(event.group)
                    continue
                self.said.append(event.message)
                if isinstance(event.message, Hello):
                    self._hello(event.peer)
            await asyncio.sleep(0.002)

    def _hello(self, peer: Peer) -> None:
        if self.refusal is not None:
            self.hub.send(peer, self.refusal)
            return
        self.peers.append(peer)
        name = f"rollout-0#{len(self.peers)}"
        self.hub.send(
            peer, Welcome(rollout_id=name, incarnation=self.incarnation, version=0, data_address=self.hub.data_address)
        )

    def send(self, message: Message) -> None:
        self.hub.send(self.peers[-1], message)

    def ack(self, group: Group, outcome: str = "accepted") -> None:
        fields = {"group_id": group.group_id, "attempt": group.attempt, "outcome": outcome}
        self.send(Ack.model_validate(fields))

    def lease(self, group_id: int, **other: object) -> None:
        fields: dict[str, object] = {
            "group_id": group_id,
            "attempt": (self.incarnation, 0),
            "split": "train",
            "born": (self.incarnation, 0),
            "prompt_id": f"p{group_id}",
            "prompt_ids": [1, 2, 3],
            "text": "1+2=",
            "fields": {"target": "3"},
            "num_samples": 2,
            "max_new_tokens": 20,
            "temperature": 1.0,
            "seed": group_id,
            "timeout_s": 10.0,
        }
        self.send(Lease.model_validate(fields | other))

    async def hears(
        self, kind: type[M], count: int = 1, where: Callable[[M], bool] = lambda m: True, patience_s: float = 8
    ) -> M:
        """The count-th message of this kind."""
        async with asyncio.timeout(patience_s):
            while True:
                found = [m for m in self.said if isinstance(m, kind) and where(m)]
                if len(found) >= count:
                    return found[count - 1]
                await asyncio.sleep(0.002)

    async def gets(self, count: int) -> list[Group]:
        async with asyncio.timeout(8):
            while len(self.groups) < count:
                await asyncio.sleep(0.002)
        return self.groups

    # ---- weights

    async def prepare(self, version: int) -> str:
        """Form a new membership and Prepare; returns once the group stands and the rollout is Prepared."""
        self.membership += 1
        sock, port = listen("127.0.0.1")
        self.send(self.prepare_message(version, port))
        spec = GroupSpec("gloo", "127.0.0.1", port, f"tag{self.membership}", 0, 2, self.membership, PHASE_S)
        self.group = await asyncio.to_thread(WeightGroup, spec, sock)
        return (await self.hears(Prepared, where=lambda m: m.membership == self.membership)).kind

    def prepare_message(self, version: int, port: int, **other: object) -> Prepare:
        fields: dict[str, object] = {
            "incarnation": self.incarnation,
            "version": version,
            "membership": self.membership,
            "backend": "gloo",
            "host": "127.0.0.1" if port else "",
            "port": port,
            "tag": f"tag{self.membership}",
            "rank": 1,
            "world_size": 2,
            "manifest": self.source.manifest.to_dict(),
            "timeout_s": PHASE_S,
        }
        return Prepare.model_validate(fields | other)

    async def stage(self, version: int) -> list[str]:
        """Broadcast every bucket; returns their digests once the rollout is Staged."""
        assert self.group is not None
        digests = []
        for k in range(len(self.source.manifest.buckets)):
            bucket = self.source.gather(k)
            assert bucket is not None
            digests.append(digest(bucket))
            await asyncio.to_thread(self.group.broadcast, bucket)
        await self.hears(Staged, where=lambda m: m.version == version and m.membership == self.membership)
        return digests

    def commit(self, version: int, digests: list[str]) -> None:
        self.send(Commit(incarnation=self.incarnation, version=version, membership=self.membership, bucket_digests=digests))

    async def publish(self, version: int) -> Committed:
        await self.prepare(version)
        self.commit(version, await self.stage(version))
        return await self.hears(Committed, where=lambda m: m.version == version and m.membership == self.membership)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        self.hub.close(0.0)
        if self.group is not None:
            self.group.close()


class Stage:
    """A worker over memory, and one learner after another."""

    def __init__(self, path: Path, config: Config, script: Script) -> None:
        self.path, self.config = path / "learner.json", config
        self.engine = ToyEngine(parameters(), script, 1024)
        self.learners: list[Learner] = []
        hello = Hello(protocol=PROTOCOL, run_id="run", config_digest="c", tokenizer_digest="t", name="rollout-0", num_slots=4)
        transport = config.transport
        door = Door(
            self.path,
            hello,
            lambda address: MemoryLink(address, max_message_bytes=1 << 20, heartbeat_timeout_s=transport.heartbeat_timeout_s),
            transport.heartbeat_s,
            transport.heartbeat_timeout_s,
            transport.connect_timeout_s,
        )
        self.worker = Worker(config, Sampler(self.engine, SingleTurn(), self.score, lambda ids: ""), door)
        self.task: asyncio.Task[str] = asyncio.create_task(self.worker.run())

    async def score(self, prompt: Prompt, answer: str) -> Scored:
        return Scored(1.0)

    def learner(self, incarnation: int = 1, **other: Any) -> Learner:
        made = Learner(self.path, MemoryHub(max_message_bytes=1 << 20), incarnation, **other)
        self.learners.append(made)
        return made


@asynccontextmanager
async def stage(path: Path, script: Script | None = None, **transport: float) -> AsyncIterator[Stage]:
    made = Stage(path, settings(**transport), script or Script())
    try:
        yield made
    finally:
        made.task.cancel()
        await asyncio.wait([made.task])
        for learner in made.learners:
            await learner.close()
