"""A process of its own for the vLLM tests: starts engines as a rollout does, plays scenes, writes what it saw.

Run as `python tests/vllm_driver.py DIR`. Writes DIR/seen.pkl, prints "held PID" with the id of the last engine's core, and
then waits to be killed: that the core dies with it is one of the tests. Weights of version v are `weights(tied, v)`, so the
tests rebuild them instead of reading them from here.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_rl.config import Config, parse_config
from async_rl.rollout import vllm_engine
from async_rl.rollout.vllm_engine import VllmEngine
from async_rl.types import Sampling, WeightName
from async_rl.weights.checksum import digest
from async_rl.weights.group import GroupSpec, WeightGroup, listen
from async_rl.weights.manifest import Manifest
from async_rl.weights.source import WeightSource

VOCAB = 150  # not a multiple of vLLM's vocabulary padding
LAYERS = 2
END_IDS = (3, 7, 11)  # config.json, generation_config.json and the tokenizer name one each
STOP = "q"
PROMPT = np.arange(20, 26, dtype=np.int32)
LONG_PROMPT = (np.arange(140, dtype=np.int32) * 7) % 100 + 20  # spans a whole block of vLLM's prefix cache on a CPU (128)


def hf_model(tied: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    end = {"eos_token_id": END_IDS[0] if tied else None, "bos_token_id": None, "pad_token_id": None}
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=tied, **end,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).float()


def weights(tied: bool, version: int) -> Any:
    """A model whose versions have nothing to do with each other, so that a token under the wrong label shows."""
    model = hf_model(tied)
    generator = torch.Generator().manual_seed(1000 + version)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.15 * noise)
    return model


def save_model(folder: Path, tied: bool) -> None:
    weights(tied, 999).save_pretrained(folder)
    if tied:
        from transformers import GenerationConfig

        GenerationConfig(eos_token_id=[END_IDS[1]]).save_pretrained(folder)
        tokenizer().save_pretrained(folder)


def tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {f"<{i}>": i for i in range(20)} | {chr(i + 77): i for i in range(20, VOCAB)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<0>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    inner.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=f"<{END_IDS[2]}>", unk_token="<0>")


def config_of(folder: Path, stop: tuple[str, ...] = ()) -> Config:
    return parse_config(
        {
            "num_steps": 1,
            "groups_per_step": 1,
            "group_size": 2,
            "model": {"path": str(folder), "max_model_len": 400},
            "rollout": {"kv_cache_bytes": 16 << 20, "max_num_seqs": 16, "max_new_tokens": 250, "stop": list(stop)},
        }
    )


class Sender:
    """What a learner does for one engine; its network waits happen in a thread."""

    def __init__(self, engine: VllmEngine, tied: bool) -> None:
        self.engine, self.tied = engine, tied
        self.membership = 0
        self.group: WeightGroup | None = None
        self.specs: list[GroupSpec] = []
        self.listener: Any = None
        self.pool = ThreadPoolExecutor(1)

    def new_membership(self, timeout_s: float = 20.0) -> None:
        if self.group is not None:
            self.group.close()
        self.group, self.membership = None, self.membership + 1
        self.listener, port = listen("127.0.0.1")
        tag = f"tag{self.membership}"
        self.specs = [GroupSpec("gloo", "127.0.0.1", port, tag, rank, 2, self.membership, timeout_s) for rank in range(2)]

    def source(self, version: int) -> WeightSource:
        return WeightSource(list(weights(self.tied, version).named_parameters()), torch.float32, 64 << 10)

    def join(self) -> WeightGroup:
        if self.group is None:
            self.group = WeightGroup(self.specs[0], self.listener)
        return self.group

    def send(self, source: WeightSource) -> list[str]:
        digests, group = [], self.join()
        for k in range(len(source.manifest.buckets)):
            bucket = source.gather(k)
            assert bucket is not None
            group.broadcast(bucket)
            digests.append(digest(bucket))
        return digests

    async def publish(self, version: int, in_flight: Any = "keep") -> dict[str, Any]:
        """One whole update; raises AssertionError when the two sides disagree about what was sent."""
        source = self.source(version)
        await self.engine.prepare(self.specs[1], source.manifest, 60)
        sent = await asyncio.get_running_loop().run_in_executor(self.pool, self.send, source)
        assert await self.engine.staged(60) == sent
        start = time.monotonic()
        checksum = await self.engine.commit(WeightName(1, version), in_flight, 60)
        assert checksum == source.checksum()
        return {"stall_s": time.monotonic() - start}


async def error_of(call: Awaitable[Any]) -> str:
    try:
        await call
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


class Scenes:
    """Each method is one scene; what it returns is what the tests judge."""

    def __init__(self, engine: VllmEngine, sender: Sender, seen: dict[str, Any]) -> None:
        self.engine, self.sender, self.seen = engine, sender, seen
        self.version = -1  # in service

    async def publish(self, version: int, in_flight: Any = "keep") -> dict[str, Any]:
        said = await self.sender.publish(version, in_flight)
        self.version = version
        return said

    async def play(self, name: str, *args: Any) -> None:
        start = time.monotonic()
        scene: Callable[..., Awaitable[Any]] = getattr(self, name)
        key = ":".join([name, *map(str, args)])
        try:
            self.seen[key] = await scene(*args)
        except Exception:
            self.seen[key] = traceback.format_exc()
        print(f"{key}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)

    async def before_the_first_commit(self) -> dict[str, str]:
        sender = self.sender
        sender.new_membership()
        tensors = sender.source(0).manifest.tensors
        renamed = tuple(t._replace(name="model.norm.weigth") if t.name == "model.norm.weight" else t for t in tensors)
        reshaped = tuple(t._replace(shape=(t.shape[0] - 1, *t.shape[1:])) if t.name == "lm_head.weight" else t for t in tensors)
        retyped = tuple(t._replace(dtype="bfloat16") for t in tensors)
        prepare = self.engine.prepare
        return {
            "generate": await error_of(self.engine.generate(PROMPT, Sampling(3, 1.0), "early")),
            "renamed": await error_of(prepare(sender.specs[1], Manifest(renamed, 4096, {}), 20)),
            "reshaped": await error_of(prepare(sender.specs[1], Manifest(reshaped, 4096, {}), 20)),
            "retyped": await error_of(prepare(sender.specs[1], Manifest(retyped, 4096, {}), 20)),
            "commit": await error_of(self.engine.commit(WeightName(1, 0), "keep", 20)),
        }

    async def weights_held(self, version: int) -> dict[str, str]:
        self.sender.new_membership()
        await self.publish(version)
        (held,) = await self.engine._engine.compute_weight_checksums()
        return {name.rpartition(":")[2]: value for name, value in held.items()}

    async def same_weights(self) -> dict[str, list[Any]]:
        draw = self.engine.generate
        seen = {}
        for t in (1.0, 0.7, 0.0):
            sampling = [Sampling(40, t, seed=i if i < 3 else None) for i in range(4)]
            seen[str(t)] = await asyncio.gather(*[draw(PROMPT + i, s, f"{t}.{i}") for i, s in enumerate(sampling)])
        seen["again"] = [await draw(PROMPT, Sampling(40, 1.0, seed=0), "again")]
        return seen

    async def one_batch(self) -> dict[str, list[Any]]:
        """Twelve seeded requests, told to be one batch: all at once, then each 5 ms after the other."""

        async def late(i: int, pause_s: float) -> Any:
            await asyncio.sleep(i * pause_s)
            return await self.engine.generate(PROMPT + i % 7, Sampling(20, 1.0, seed=i), f"{pause_s}.{i}")

        seen = {}
        for pause_s in (0.0, 0.005):
            async with self.engine.together(12):
                tasks = [asyncio.create_task(late(i, pause_s)) for i in range(12)]
            seen[str(pause_s)] = await asyncio.gather(*tasks)
        # One of two never comes: the engine must not wait for it for ever.
        async with self.engine.together(2):
            alone = asyncio.create_task(late(0, 0.0))
        seen["alone"] = [await alone]
        return seen

    async def refusals(self) -> dict[str, Any]:
        draw, sampling = self.engine.generate, Sampling(3, 1.0)
        return {
            "too long": await draw(np.full(401, 30, dtype=np.int32), sampling, "long"),
            "unknown id": await draw(np.array([VOCAB + 500], dtype=np.int32), sampling, "unknown"),
            "empty": await draw(np.array([], dtype=np.int32), sampling, "empty"),
            "full": await draw(np.full(395, 30, dtype=np.int32), Sampling(50, 1.0), "full"),
        }

    async def updates_in_flight(self, mode: Any, prompt: np.ndarray) -> dict[str, Any]:
        """Three answers of 200 tokens, two updates inside them; again when the machine was too slow or too fast for that."""
        pace = time.monotonic()
        await self.engine.generate(prompt, Sampling(20, 1.0), "pace")
        pause_s, answers = 2.5 * (time.monotonic() - pace), []
        for attempt in range(4):
            versions = [self.version, self.version + 1, self.version + 2]
            tasks = [
                asyncio.create_task(self.engine.generate(prompt + i, Sampling(200, 1.0, seed=i), f"{mode}{attempt}.{i}"))
                for i in range(3)
            ]
            for version in versions[1:]:
                await asyncio.sleep(pause_s)
                await self.publish(version, mode)
            answers = await asyncio.gather(*tasks)
            if all(len(set(a.versions.tolist())) == 3 for a in answers):
                return {"versions": versions, "answers": answers}
            pause_s *= 0.6
        raise AssertionError(f"versions seen: {[sorted(set(a.versions.tolist())) for a in answers]}")

    async def recompute(self) -> dict[str, Any]:
        return await self.updates_in_flight("recompute", PROMPT)

    async def abort_mode(self) -> dict[str, Any]:
        return await self.updates_in_flight("abort", PROMPT)

    async def keep(self) -> dict[str, Any]:
        seen = await self.updates_in_flight("keep", LONG_PROMPT)
        later = [await self.engine.generate(LONG_PROMPT + i, Sampling(20, 1.0), f"later{i}") for i in range(2)]
        return seen | {"later": later}

    async def user_abort(self) -> list[Any]:
        tasks = [asyncio.create_task(self.engine.generate(PROMPT, Sampling(390, 1.0), f"user{i}")) for i in range(2)]
        await asyncio.sleep(0.5)
        await self.engine.abort(["user0", "nobody"])
        aborted = await asyncio.wait_for(tasks[0], 20)
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        deadline = time.monotonic() + 10
        while self.engine._engine.output_processor.has_unfinished_requests() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return [aborted, self.engine._engine.output_processor.get_num_unfinished_requests(), dict(self.engine._drafts)]

    async def silent_sender(self) -> dict[str, Any]:
        """The group forms and nothing is sent; then a group that never forms; then a good one."""
        sender, source = self.sender, self.sender.source(51)
        seen: dict[str, Any] = {"before": self.version}
        sender.new_membership(timeout_s=2.0)
        await self.engine.prepare(sender.specs[1], source.manifest, 20)
        await asyncio.get_running_loop().run_in_executor(sender.pool, sender.join)
        start = time.monotonic()
        seen["early"] = await error_of(self.engine.staged(0.2))
        seen["silent"] = await error_of(self.engine.staged(20))
        seen["silent_s"] = time.monotonic() - start
        seen["meanwhile"] = await self.engine.generate(PROMPT, Sampling(10, 1.0), "meanwhile")
        await self.engine.discard()
        sender.new_membership(timeout_s=1.0)
        await self.engine.prepare(sender.specs[1], source.manifest, 20)
        seen["not formed"] = await error_of(self.engine.staged(20))
        sender.new_membership()
        await self.publish(51)
        seen["after"] = await self.engine.generate(PROMPT, Sampling(10, 1.0), "after")
        return seen

    async def frozen_core(self) -> dict[str, Any]:
        """The core stops between staging and commit: the engine is dirty until a later commit succeeds."""
        sender, source, seen = self.sender, self.sender.source(52), {}
        waiting = asyncio.create_task(self.engine.generate(PROMPT, Sampling(390, 1.0), "in flight"))
        await self.engine.prepare(sender.specs[1], source.manifest, 20)
        await asyncio.get_running_loop().run_in_executor(sender.pool, sender.send, source)
        await self.engine.staged(20)
        core = self.engine._core.pid
        assert core
        arrived = self.engine._arrived

        async def arrived_then_frozen(timeout_s: float) -> list[str] | None:
            digests = await arrived(timeout_s)
            os.kill(core, signal.SIGSTOP)
            return digests

        self.engine._arrived = arrived_then_frozen  # type: ignore[method-assign]
        seen["commit"] = await error_of(self.engine.commit(WeightName(1, 52), "keep", 1.0))
        self.engine._arrived = arrived  # type: ignore[method-assign]
        seen["ping"] = await error_of(self.engine.ping(0.5))
        seen["generate"] = await error_of(self.engine.generate(PROMPT, Sampling(3, 1.0), "dirty"))
        os.kill(core, signal.SIGCONT)
        await self.engine.ping(20)
        seen["still dirty"] = await error_of(self.engine.generate(PROMPT, Sampling(3, 1.0), "dirty"))
        sender.new_membership()
        await self.publish(53)
        seen["after"] = await self.engine.generate(PROMPT, Sampling(10, 1.0), "clean")
        seen["in flight"] = await asyncio.wait_for(waiting, 60)
        return seen

    async def stall(self) -> list[float]:
        return [(await self.publish(60 + i))["stall_s"] for i in range(5)]

    async def killed_core(self) -> dict[str, str]:
        task = asyncio.create_task(self.engine.generate(PROMPT, Sampling(390, 1.0), "doomed"))
        await asyncio.sleep(0.3)
        os.kill(self.engine._core.pid or 0, signal.SIGKILL)
        in_flight = await error_of(asyncio.wait_for(task, 20))
        return {"generate": in_flight, "ping": await error_of(self.engine.ping(5))}

    async def frozen_idle_core(self) -> dict[str, Any]:
        """The core stops just before requests are to enter together, then while they do."""
        core, seen = self.engine._core.pid or 0, {}
        vllm_engine.IDLE_CORE_S = 1.0

        async def enter(*, frozen_at: str) -> None:
            if frozen_at == "pause":
                os.kill(core, signal.SIGSTOP)
            async with self.engine.together(2):
                os.kill(core, signal.SIGSTOP)

        for moment in ("pause", "resume"):
            start = time.monotonic()
            seen[moment] = await error_of(asyncio.wait_for(enter(frozen_at=moment), 20))
            seen[f"{moment}_s"] = time.monotonic() - start
            os.kill(core, signal.SIGCONT)
            await self.engine._engine.engine_core.resume_scheduler_async()
        return seen

    async def ends(self) -> dict[str, Any]:
        draw = self.engine.generate
        answers = await asyncio.gather(*[draw(PROMPT, Sampling(250, 1.0, seed=i), f"end{i}") for i in range(12)])
        stopped = await asyncio.gather(*[draw(PROMPT, Sampling(250, 1.0, (STOP,), seed=i), f"stop{i}") for i in range(6)])
        return {"ids": self.engine._end_ids, "answers": answers, "stopped": stopped}


UNTIED = ("before_the_first_commit", "weights_held:0", "same_weights", "one_batch", "refusals", "recompute", "abort_mode")
UNTIED += ("keep", "user_abort", "silent_sender", "frozen_core", "stall", "killed_core")
TIED = ("weights_held:0", "weights_held:1", "same_weights", "ends", "frozen_idle_core")


async def play_all(engine: VllmEngine, tied: bool, names: tuple[str, ...], seen: dict[str, Any]) -> None:
    scenes = Scenes(engine, Sender(engine, tied), seen)
    for name in names:
        scene, *args = name.split(":")
        await scenes.play(scene, *map(int, args))
    if scenes.sender.group is not None:
        scenes.sender.group.close()


def main(folder: Path) -> None:
    # torchrun's environment must not reach an engine.
    os.environ.update(RANK="3", WORLD_SIZE="8", MASTER_ADDR="10.255.255.1", MASTER_PORT="1")
    seen: dict[str, Any] = {"untied": {}, "tied": {}}
    for tied in (False, True):
        save_model(folder / str(tied), tied)
    engine = VllmEngine.create(config_of(folder / "False"), timeout_s=200)
    asyncio.run(play_all(engine, False, UNTIED, seen["untied"]))
    private_dir = Path(engine._private_dir)
    asyncio.run(engine.close())
    seen["left_behind"] = [private_dir.exists(), engine._core.is_alive()]
    engine = VllmEngine.create(config_of(folder / "True", (STOP,)), timeout_s=200)
    asyncio.run(play_all(engine, True, TIED, seen["tied"]))
    (folder / "writing.pkl").write_bytes(pickle.dumps(seen))
    (folder / "writing.pkl").rename(folder / "seen.pkl")
    print(f"held {engine._core.pid}", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
