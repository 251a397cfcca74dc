"""The faults: each is a generator that injects, yields for how many seconds it lasts, and heals.

What it returns, if anything, is a further condition of having survived. Imports the scene. All choices come from the given
random numbers, so that a seed is a schedule.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator

from async_rl.transport.discovery import read_discovery
from benchmarks.chaos.scene import Scene, go_on, kill, stop

Condition = Callable[[], object]
Fault = Generator[float, None, Condition | None]


def kill_rollout(scene: Scene, rng: random.Random) -> Fault:
    kill([scene.toy(rng.randrange(2))])
    yield 0.0
    return None


def kill_vllm_rollout(scene: Scene, rng: random.Random) -> Fault:
    kill([scene.vllm()])
    yield 0.0
    return None


def kill_engine_core(scene: Scene, rng: random.Random) -> Fault:
    kill([scene.core()])
    yield 0.0
    return None


def kill_learner(scene: Scene, rng: random.Random) -> Fault:
    ranks, before = scene.ranks(), scene.incarnation
    kill(rng.choice([ranks, ranks[:1], ranks[1:], [*ranks, scene.torchrun()]]))
    yield 0.0
    return lambda: scene.incarnation > before


def freeze_rollout(scene: Scene, rng: random.Random) -> Fault:
    return _freeze([scene.toy(rng.randrange(2))], rng.uniform(1.0, 20.0))


def freeze_vllm_rollout(scene: Scene, rng: random.Random) -> Fault:
    return _freeze([scene.vllm()], rng.uniform(1.0, 20.0))


def freeze_engine_core(scene: Scene, rng: random.Random) -> Fault:
    return _freeze([scene.core()], rng.uniform(1.0, 20.0))


def freeze_learner_rank(scene: Scene, rng: random.Random) -> Fault:
    return _freeze([rng.choice(scene.ranks())], rng.uniform(1.0, 10.0))


def freeze_launcher(scene: Scene, rng: random.Random) -> Fault:
    return _freeze([scene.train.pid, scene.torchrun()], rng.uniform(1.0, 10.0))


def _freeze(pids: list[int], seconds: float) -> Fault:
    stop(pids)
    yield seconds
    go_on(pids)
    return None


def cut_network(scene: Scene, rng: random.Random) -> Fault:
    host = rng.choice(scene.hosts)
    host.cut()
    yield rng.uniform(1.0, 20.0)
    host.heal()
    return None


def throttle_network(scene: Scene, rng: random.Random) -> Fault:
    host = rng.choice(scene.hosts)
    host.throttle(rng.choice([100_000, 1_000_000, 10_000_000]))
    yield rng.uniform(5.0, 20.0)
    host.unthrottle()
    return None


def fill_disk(scene: Scene, rng: random.Random) -> Fault:
    filler, failures, saved = scene.run_dir / "checkpoints" / "filler", scene.text().count("failed ("), scene.saved()
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            pass
    scene.wait("a failed checkpoint", lambda: scene.text().count("failed (") > failures, 60.0)
    yield 0.0
    filler.unlink()
    return lambda: scene.saved() not in ("", saved)


def slow_rewards(scene: Scene, rng: random.Random) -> Fault:
    return _rewards(scene, rng, "slow")


def crashing_rewards(scene: Scene, rng: random.Random) -> Fault:
    return _rewards(scene, rng, rng.choice(["raise", "exit"]))


def _rewards(scene: Scene, rng: random.Random, mode: str) -> Fault:
    scene.mode_file.write_text(mode)
    yield rng.uniform(5.0, 15.0)
    scene.mode_file.unlink()
    return None


def garbage(scene: Scene, rng: random.Random) -> Fault:
    """Bytes that are no ZMTP, half of a greeting, a header that promises a gigabyte, many connections that say nothing."""
    found = read_discovery(scene.run_dir / "learner.json")
    host, _, port = found.control_address.removeprefix("tcp://").rpartition(":") if found else ("", "", "0")
    until = time.monotonic() + 5.0
    words = [rng.randbytes(rng.randrange(1, 4096)) for _ in range(64)]
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 32)
    words += [greeting[:20], greeting, greeting + b"\x02" + struct.pack(">Q", 1 << 30), b""]

    def send() -> None:
        silent: list[socket.socket] = []
        while time.monotonic() < until:
            for word in words:
                try:
                    peer = socket.create_connection((host, int(port)), timeout=1.0)
                    peer.sendall(word)
                    silent.append(peer)
                except OSError:
                    pass
                if len(silent) > 200:
                    silent.pop(0).close()
        for peer in silent:
            peer.close()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    yield 5.0
    thread.join()
    return None


def freeze_all_rollouts(scene: Scene, rng: random.Random) -> Fault:
    return _freeze([scene.toy(0), scene.toy(1), scene.vllm(), scene.core()], rng.uniform(1.0, 20.0))


def leave_and_join(scene: Scene, rng: random.Random) -> Fault:
    os.kill(scene.toy(rng.randrange(2)), 15)
    yield 0.0
    return None


KINDS = (
    kill_rollout,
    kill_vllm_rollout,
    kill_engine_core,
    kill_learner,
    freeze_rollout,
    freeze_vllm_rollout,
    freeze_engine_core,
    freeze_learner_rank,
    freeze_launcher,
    freeze_all_rollouts,
    cut_network,
    throttle_network,
    fill_disk,
    slow_rewards,
    crashing_rewards,
    garbage,
    leave_and_join,
)


def schedule(num_faults: int, names: list[str], rng: random.Random) -> list[Callable[[Scene, random.Random], Fault]]:
    """Every kind, or those of these names, once in each round, in an order of its own."""
    chosen = [kind for kind in KINDS if not names or kind.__name__ in names]
    rounds = -(-num_faults // len(chosen))
    return [kind for _ in range(rounds) for kind in rng.sample(chosen, len(chosen))][:num_faults]
