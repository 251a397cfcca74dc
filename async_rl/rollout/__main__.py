"""`python -m async_rl.rollout RUN_DIR --name NAME`: one rollout process.

Owns the order of creation (engine before threads and sockets, for it may fork; then the reward pool, which spawns; then the
wire), signals, and exit codes: 0 the learner ended the run, 2 refused or misconfigured, 3 no learner, 1 anything else,
128 + n signal n. Invariant: once it has decided to go it is gone within SHUTDOWN_S, with every child.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from async_rl.config import Config, ConfigError, load_config
from async_rl.envs.base import TaskError
from async_rl.envs.rewards import RewardError, RewardPool, check_loadable
from async_rl.envs.single_turn import SingleTurn
from async_rl.envs.tasks import examples
from async_rl.envs.text import decoder, load_tokenizer, tokenizer_digest
from async_rl.observability.files import read_run_id
from async_rl.observability.log import get_logger, setup_logging
from async_rl.observability.process import die_with_parent
from async_rl.observability.status import StatusFile
from async_rl.observability.waiting import waiting
from async_rl.rollout.engine import Engine, EngineDead
from async_rl.rollout.join import Door, Fatal, Unreachable
from async_rl.rollout.scheduler import Sampler
from async_rl.rollout.stopped import Stopped, raise_stopped, until_stopped
from async_rl.rollout.toy_engine import ToyEngine
from async_rl.rollout.vllm_engine import VllmEngine
from async_rl.rollout.worker import Worker
from async_rl.transport.base import Link, TransportError
from async_rl.transport.keys import RolloutKeys, read_rollout_keys
from async_rl.transport.messages import NAME, PROTOCOL, Hello
from async_rl.transport.zmq import ZmqLink

log = get_logger(__name__)
ENGINE_VARIABLE = "ASYNC_RL_ENGINE"  # for tests: one rollout's own engine, in a run whose others have another
SHUTDOWN_S = 5.0
ENGINE_CLOSE_S = 3.0
# torchrun's words: an engine that inherits them takes itself for a rank of somebody else's job
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Outcome(NamedTuple):
    code: int
    sentence: str


def main(run_dir: Path, name: str) -> int:
    """Runs one rollout process to its end; prints one sentence and returns the exit code."""
    die_with_parent()
    raise_stopped()
    try:
        outcome = _run(run_dir, name)
    except Stopped as stopped:
        outcome = Outcome(stopped.code, stopped.sentence)
    except (ConfigError, TaskError, RewardError) as e:
        outcome = Outcome(2, str(e))
    except (EngineDead, TransportError) as e:
        outcome = Outcome(1, str(e))
    _exit_at_the_latest_after(SHUTDOWN_S, outcome)
    print(f"{name}: {outcome.sentence}", file=sys.stderr, flush=True)
    return outcome.code


def _run(run_dir: Path, name: str) -> Outcome:
    if not re.match(NAME, name):
        raise ConfigError(f"--name is '{name}': use letters, digits, dots and dashes, at most 64")
    config = load_config(run_dir / "config.yaml")
    run_id = read_run_id(run_dir)
    setup_logging(name, None, config.observe.log_level)
    status = StatusFile(run_dir, name).start()
    try:
        return _start(config, run_dir, name, run_id, status)
    finally:
        status.close()


def _start(config: Config, run_dir: Path, name: str, run_id: str, status: StatusFile) -> Outcome:
    for variable in FOREIGN:
        os.environ.pop(variable, None)
    torch.set_num_threads(config.rollout.threads)
    folder = config.transport.keys
    keys = read_rollout_keys(Path(folder)) if folder is not None else None
    with waiting(f"reward {config.data.reward} to load", normal=True):
        check_loadable(config.data.reward, _examples(config))
    kind = os.environ.get(ENGINE_VARIABLE, config.rollout.engine)
    log.info("starting the %s engine, then joining the run in %s", kind, run_dir)
    engine = _engine(config, kind)
    rollout = config.rollout
    limits = (rollout.reward_workers, rollout.reward_timeout_s, rollout.reward_memory_bytes)
    pool = RewardPool(config.data.reward, *limits)
    sampler = Sampler(engine, SingleTurn(), pool.score, decoder(load_tokenizer(config.model)))
    hello = Hello(
        protocol=PROTOCOL,
        run_id=run_id,
        config_digest=config.digest(),
        tokenizer_digest=tokenizer_digest(config.model),
        name=name,
        num_slots=rollout.num_slots,
        pid=os.getpid(),
    )
    return asyncio.run(_serve(config, sampler, hello, run_dir, pool, keys, status))


def _examples(config: Config) -> list[tuple[str, list[str]]]:
    """None where the data is not: prompts come from the learner, maybe of another host."""
    try:
        return examples(config.data)
    except TaskError:
        return []


def _engine(config: Config, kind: str) -> Engine:
    if kind == "toy":
        return ToyEngine.create(config)
    return VllmEngine.create(config, timeout_s=config.rollout.start_timeout_s)


async def _serve(
    config: Config,
    sampler: Sampler,
    hello: Hello,
    run_dir: Path,
    pool: RewardPool,
    keys: RolloutKeys | None,
    status: StatusFile,
) -> Outcome:
    transport = config.transport

    def connect(address: str) -> Link:
        return ZmqLink(
            address,
            max_message_bytes=transport.max_message_bytes,
            keys=keys,
            heartbeat_timeout_s=transport.heartbeat_timeout_s,
        )

    door = Door(
        run_dir / "learner.json",
        hello,
        connect,
        transport.heartbeat_s,
        transport.heartbeat_timeout_s,
        transport.connect_timeout_s,
        str(Path(transport.keys) / "rollout.key") if transport.keys is not None else "",
    )
    worker = Worker(config, sampler, door)
    status.look = worker.status
    outcome = await _outcome(worker)
    _exit_at_the_latest_after(SHUTDOWN_S, outcome)
    log.info("counted: %s", json.dumps(worker.summary()))
    try:
        async with asyncio.timeout(ENGINE_CLOSE_S):
            await sampler.engine.close()
    except (TimeoutError, EngineDead) as e:
        log.warning("the engine did not close: %s", str(e) or f"no answer in {ENGINE_CLOSE_S:g} s")
    pool.close()
    return outcome


async def _outcome(worker: Worker) -> Outcome:
    try:
        return Outcome(0, f"the learner ended the run: {await until_stopped(worker.run())}")
    except Stopped as stopped:
        return Outcome(stopped.code, stopped.sentence)
    except Fatal as e:
        return Outcome(2, str(e))
    except Unreachable as e:
        return Outcome(3, str(e))
    except (EngineDead, TransportError) as e:
        return Outcome(1, str(e))
    except Exception as e:
        log.exception("the worker failed")
        return Outcome(1, f"{type(e).__name__}: {e}")


def _exit_at_the_latest_after(seconds: float, outcome: Outcome) -> None:
    """Children carry a death signal, so leaving abruptly leaves none behind."""
    timer = threading.Timer(seconds, os._exit, [outcome.code])
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m async_rl.rollout", description="One rollout process of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--name", default="rollout-0", help="stable over restarts, unique within the run")
    arguments = parser.parse_args()
    code = main(arguments.run_dir, arguments.name)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; the interpreter's own end, with torch and vLLM loaded, has no bound
