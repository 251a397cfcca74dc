"""One learner rank: build its parts, then lead (rank 0) or follow. Started by torchrun, or alone as a single rank.

Owns the order of construction, resume, and what is said at the end. Invariant: whatever ends the run, rollouts get
END, the other ranks get END, the books are closed and checked, and `result.json` says how it ended; a rank that has lost
another one only ends, for the run goes on from its checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.config import Config, ConfigError, load_config
from async_rl.data.prompts import PromptError
from async_rl.envs.base import TaskError
from async_rl.envs.tasks import build_prompts
from async_rl.envs.text import load_tokenizer
from async_rl.learner import LearnerError
from async_rl.learner.checkpoints.checkpoint import Checkpointer, holds_critic, step_of
from async_rl.learner.checkpoints.state import unpack_state
from async_rl.learner.commands import Commands
from async_rl.learner.failure import RunStopped, lost_rank, missing_ranks, tell
from async_rl.learner.lead import lead, weight_backend
from async_rl.learner.rank import Rank
from async_rl.learner.replay import lead_replay, order_of
from async_rl.learner.signals import Stop
from async_rl.learner.trainer import follow
from async_rl.learner.update.model import hf_named_parameters, load_policy, make_mesh
from async_rl.learner.update.optim import Optimizer, num_optimizer_steps
from async_rl.learner.update.step import PolicyUpdate
from async_rl.learner.update.value_update import trains_critic
from async_rl.observability import stacks
from async_rl.observability.log import get_logger, setup_logging
from async_rl.observability.process import EXIT_LOST_RANK, LOST_RANK, die_with_parent
from async_rl.observability.status import StatusFile
from async_rl.observability.waiting import waiting
from async_rl.transport.base import TransportError
from async_rl.weights.source import WeightSource

log = get_logger(__name__)
CAUSE_FIRST_S = 1.0  # torchrun takes the exit code of the rank whose end it sees first, and it looks ten times a second


def main(run_dir: str) -> int:
    """Run one rank to its end; returns the exit code."""
    die_with_parent()
    folder = Path(run_dir)
    stop = Stop()
    stop.install()
    number = int(os.environ.get("RANK", "0"))
    status = StatusFile(folder, f"learner-{number}").start()
    try:
        config = load_config(folder / "config.yaml")
        setup_logging(f"learner-{number}", folder / "logs" / f"learner-{number}.log", config.observe.log_level)
        device = _device(config)
        # first what a user may have got wrong, then what takes long to load
        order = order_of(folder)
        tasks = build_prompts(config, load_tokenizer(config.model)) if number == 0 and order is None else None
        leader = _init_distributed(config, device)
        rank = _build(config, folder, device)
        status.look = lambda: {"state": rank.commands.doing}
        checkpoint = rank.checkpointer.latest_complete() if config.checkpoint.resume else None
        if _has_critic(config, checkpoint):
            rank.make_critic()
        packed = rank.load(checkpoint) if checkpoint else None
        state = unpack_state(packed, checkpoint) if number == 0 and packed is not None and checkpoint else None
        if tasks is not None:
            return lead(config, folder, rank, tasks, state, stop, status)
        if number == 0 and order is not None:
            return lead_replay(config, folder, rank, order, state, stop, status)
        stop.follow(leader)
        follow(rank)
        return 0
    except (ConfigError, LearnerError, PromptError, TaskError, TransportError) as e:
        tell(str(e))
        return 2
    except OSError as e:  # of the run's folder, before training: whoever writes there later has a word of his own for it
        tell(f"{e.filename or folder} cannot be read or written ({e.strerror or e}): mend it, or free space on its disk")
        return 2
    except RunStopped as e:
        return e.code
    except Exception as e:
        if not lost_rank(e):
            log.exception("rank %d failed", number)
            tell(f"rank {number} failed: {type(e).__name__}: {' '.join(str(e).split())[:200]}")
            return 1
        stacks.dump(f"rank {number} has lost another rank")
        lost = ", ".join(str(rank) for rank in missing_ranks())
        tell(f"rank {number} {LOST_RANK} {lost}: {' '.join(str(e).split())[:200]}")
        time.sleep(CAUSE_FIRST_S)
        return EXIT_LOST_RANK
    finally:
        status.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(config: Config) -> torch.device:
    wanted = config.learner.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("learner.device is cuda, but torch sees no CUDA device here: use cpu, or install with GPU=1")
    if wanted == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(config.learner.threads)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _init_distributed(config: Config, device: torch.device) -> int:
    """Returns the pid of rank 0: all ranks are on this host."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.learner.step_timeout_s)
    if "RANK" in os.environ:
        with waiting("all ranks to meet"):
            dist.init_process_group(backend, timeout=timeout)
    else:
        alone = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
    pid = torch.tensor([os.getpid()])
    dist.broadcast(pid, src=0)
    return int(pid)


def _build(config: Config, folder: Path, device: torch.device) -> Rank:
    torch.manual_seed(config.seed)
    mesh = make_mesh(config.learner, device)
    policy = load_policy(config, device, mesh)
    reference = load_policy(config, device, mesh) if config.algorithm.has_reference else None
    named = hf_named_parameters(policy)
    optimizer = Optimizer(named, config.learner, config.learner.lr, num_optimizer_steps(config))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.learner.step_timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    savers = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.learner.step_timeout_s))
    assert isinstance(savers, dist.ProcessGroup)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    place = device if weight_backend(config) == "nccl" else torch.device("cpu")  # gloo sends from host memory
    return Rank(
        policy=policy,
        optimizer=optimizer,
        update=PolicyUpdate(config, policy, optimizer, group, reference),
        source=WeightSource(named, dtype, config.weights.bucket_bytes, root=dist.get_rank() == 0, device=place),
        commands=Commands(group),
        checkpointer=Checkpointer(folder / "checkpoints", config.checkpoint.keep, savers),
        mesh=mesh,
        group=group,
    )


def _has_critic(config: Config, checkpoint: Path | None) -> bool:
    """Whether there is a critic before the first step of this life: what the checkpoint holds must have a place to go."""
    if checkpoint is None:
        return trains_critic(config, 0)
    # One that begins at the very step that comes next is made there.
    begun = trains_critic(config, max(0, step_of(checkpoint) - 1))
    return begun or (config.algorithm.has_critic and holds_critic(checkpoint))


if __name__ == "__main__":
    code = main(sys.argv[1])
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):  # a full disk, of which was told
            stream.flush()
    # Everything is closed. The interpreter's own end aborts now and then, when a thread is just letting go of tensors, and
    # takes signals for orders to die.
    os._exit(code)
