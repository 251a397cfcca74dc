"""What a weight update costs: transfer against one bare broadcast of as many bytes, and the stall of a running engine.

Transfer is learner to one receiver over loopback (gloo), with gather, digests on both sides and the receiver's checksum; the
bare broadcast moves one flat buffer over a group of the same kind and looks at nothing. The two take turns. Stall is the time
from pause to resume (load, check, label) on real vLLM with the tiny policy, 8 answers in flight; commit is the whole
call, which also waits for the decoding step under way.
Prints one JSON object; takes about half a minute, most of it vLLM's start. `--no-engine` leaves the stall out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from async_rl.config import parse_config
from async_rl.rollout.vllm_engine import VllmEngine
from async_rl.types import Sampling, WeightName
from async_rl.weights.checksum import digest
from async_rl.weights.group import GroupSpec, WeightGroup, listen
from async_rl.weights.manifest import Manifest
from async_rl.weights.receiver import Receiver
from async_rl.weights.source import WeightSource

GIB = 1 << 30
BUCKET_BYTES = 32 << 20
NUM_ROUNDS = 7
NUM_COMMITS = 12
TIMEOUT_S = 60.0
MODES = ("keep", "recompute", "abort")


def spec(port: int, rank: int, tag: str) -> GroupSpec:
    return GroupSpec("gloo", "127.0.0.1", port, tag, rank, 2, 1, TIMEOUT_S)


def tiny_policy() -> Any:
    """The architecture of the tiny policy, with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=98, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=True,
            eos_token_id=None, bos_token_id=None,
        )
    ).float()  # fmt: skip


def send(source: WeightSource, group: WeightGroup, pool: ThreadPoolExecutor) -> None:
    """As the learner does: bucket k is broadcast while bucket k + 1 is gathered and hashed."""
    broadcast = None
    for k in range(len(source.manifest.buckets)):
        bucket = source.gather(k)
        assert bucket is not None
        if broadcast is not None:
            broadcast.result()
        broadcast = pool.submit(group.broadcast, bucket)
        digest(bucket)
    if broadcast is not None:
        broadcast.result()


def receive(orders: Connection, port: int, bare_port: int, manifest: dict[str, Any]) -> None:
    """The receiving process: one round per order, until "stop"."""
    torch.set_num_threads(1)
    receiver = Receiver(spec(port, 1, "ours"), Manifest.from_dict(manifest))
    bare = WeightGroup(spec(bare_port, 1, "bare"))
    flat = torch.empty(receiver.manifest.num_bytes, dtype=torch.uint8)
    while (order := orders.recv()) != "stop":
        if order == "ours":
            receiver.post()
        orders.send("posted")
        if order == "ours":
            receiver.wait(TIMEOUT_S)
        else:
            bare.broadcast(flat)
        orders.send("arrived")


def transfer(named: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Medians over rounds that alternate between ours and the bare broadcast."""
    source = WeightSource(named, torch.float32, BUCKET_BYTES)
    (listener, port), (bare_listener, bare_port) = listen("127.0.0.1"), listen("127.0.0.1")
    orders, theirs = multiprocessing.Pipe()
    arguments = (theirs, port, bare_port, source.manifest.to_dict())
    child = multiprocessing.get_context("fork").Process(target=receive, args=arguments, daemon=True)
    child.start()
    bare = WeightGroup(spec(bare_port, 0, "bare"), bare_listener)
    flat, group, seconds = torch.ones(source.manifest.num_bytes, dtype=torch.uint8), None, {"ours": [], "bare": []}
    with ThreadPoolExecutor(1) as pool:
        for _ in range(NUM_ROUNDS):
            for kind, taken in seconds.items():
                orders.send(kind)
                orders.recv()
                group = group or WeightGroup(spec(port, 0, "ours"), listener)
                start = time.perf_counter()
                if kind == "ours":
                    send(source, group, pool)
                else:
                    bare.broadcast(flat)
                orders.recv()
                taken.append(time.perf_counter() - start)
    orders.send("stop")
    child.join(10)
    gib = {kind: source.manifest.num_bytes / GIB / statistics.median(taken[1:]) for kind, taken in seconds.items()}
    return {
        "num_bytes": source.manifest.num_bytes,
        "num_buckets": len(source.manifest.buckets),
        "transfer_gib_per_s": round(gib["ours"], 3),
        "bare_broadcast_gib_per_s": round(gib["bare"], 3),
        "ratio": round(gib["ours"] / gib["bare"], 3),
    }


async def stalls(engine: VllmEngine, model: Any) -> dict[str, Any]:
    """Milliseconds per commit, by in-flight mode, with 8 answers running."""
    source = WeightSource(list(model.named_parameters()), torch.float32, BUCKET_BYTES)
    listener, port = listen("127.0.0.1")
    group, seen, version = None, {}, 0
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as sender:
        for mode in ("keep", *MODES):  # the first round also warms up
            seen[mode] = []
            for _ in range(NUM_COMMITS):
                running = []
                if version:
                    draw = [engine.generate(np.arange(8), Sampling(60, 1.0), f"{version}.{i}") for i in range(8)]
                    running = [asyncio.create_task(d) for d in draw]
                await engine.prepare(spec(port, 1, "ours"), source.manifest, TIMEOUT_S)
                group = group or await asyncio.to_thread(WeightGroup, spec(port, 0, "ours"), listener)
                await asyncio.get_running_loop().run_in_executor(sender, send, source, group, pool)
                await engine.staged(TIMEOUT_S)
                start = time.perf_counter()
                assert await engine.commit(WeightName(1, version), mode, TIMEOUT_S) == source.checksum()
                seen[mode].append((engine.stall_s, time.perf_counter() - start))
                await asyncio.gather(*running)
                version += 1
    await engine.close()
    return {
        mode: {
            "stall_median": ms(statistics.median(stall for stall, _ in taken)),
            "stall_max": ms(max(stall for stall, _ in taken)),
            "commit_median": ms(statistics.median(commit for _, commit in taken)),
        }
        for mode, taken in seen.items()
    }


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-engine", action="store_true", help="measure the transfer only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, result = tiny_policy(), {}
    if not options.no_engine:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            tree = {"num_steps": 1, "groups_per_step": 1, "group_size": 2, "model": {"path": folder, "max_model_len": 256}}
            engine = VllmEngine.create(parse_config(tree | {"rollout": {"max_new_tokens": 64}}), timeout_s=300)
            result["update_ms"] = asyncio.run(stalls(engine, model))
    result["tiny"] = transfer(list(model.named_parameters()))
    result["large"] = transfer([(f"w{i}", torch.randn(1024, 1024 + i)) for i in range(64)])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
