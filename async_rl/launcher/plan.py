"""Who runs on this host: command line, environment, cores and GPUs of each process.

Pure: the machine (cores, GPUs, environment) is an argument. Imports config and observability.process.
Invariant: learner ranks come first, then rollouts in order; no two processes share a core unless there are too few.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.config import Config
from async_rl.observability.process import HOST_CORES

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Set by torchrun. A rollout that inherited them would take itself for a learner rank."""


@dataclass(frozen=True)
class Machine:
    """What this host offers: usable cores, GPU names as CUDA_VISIBLE_DEVICES takes them, the environment."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    environ: Mapping[str, str]


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. `env` is all of its environment; `cores` None leaves it where the system puts it."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    cores: frozenset[int] | None
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    learner: ProcessSpec
    rollouts: tuple[ProcessSpec, ...]

    @property
    def shares_gpu(self) -> bool:
        """Whether any GPU serves two processes; NCCL refuses that."""
        named = [gpu for spec in (self.learner, *self.rollouts) for gpu in spec.gpus]
        return len(named) != len(set(named))

    @property
    def own_gpus(self) -> bool:
        """Whether learner and rollouts have GPUs and share none. Of rollouts started by hand nobody knows the card."""
        return bool(self.learner.gpus and self.rollouts) and all(r.gpus for r in self.rollouts) and not self.shares_gpu


def make_plan(config: Config, run_dir: Path, machine: Machine) -> Plan:
    """The processes that `train` starts for this configuration on this machine."""
    num_ranks, count = config.learner.ranks, config.rollout.count
    cores = _split_cores(machine.cores, num_ranks * config.learner.threads, [config.rollout.threads] * count)
    learner_gpus, rollout_gpus = _split_gpus(machine.gpus, num_ranks if config.learner.device != "cpu" else 0, count)
    learner = ProcessSpec(
        name="learner",
        argv=learner_argv(num_ranks, run_dir),
        env=_environment(machine.environ, config.learner.threads, learner_gpus, machine.cores if cores[0] else ()),
        log=log_path(run_dir, "learner"),
        cores=cores[0],
        gpus=learner_gpus,
    )
    rollouts = tuple(
        ProcessSpec(
            name=name,
            argv=rollout_argv(run_dir, name),
            env=_environment(machine.environ, config.rollout.threads, rollout_gpus[i]),
            log=log_path(run_dir, name),
            cores=cores[1 + i],
            gpus=rollout_gpus[i],
        )
        for i, name in enumerate(own_names(config))
    )
    return Plan(learner, rollouts)


def own_names(config: Config) -> list[str]:
    """Of the rollouts that the launcher starts."""
    return [f"rollout-{i}" for i in range(config.rollout.count)]


def learner_argv(num_ranks: int, run_dir: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "async_rl.learner.torchrun", str(num_ranks), str(run_dir))


def rollout_argv(run_dir: Path, name: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "async_rl.rollout", str(run_dir), "--name", name)


def evaluation_argv(engine: str, config_path: str, overrides: Sequence[str]) -> tuple[str, ...]:
    return (sys.executable, "-m", "async_rl.rollout.evaluate", engine, config_path, *overrides)


def log_path(run_dir: Path, name: str) -> Path:
    return run_dir / "logs" / f"{name}.log"


def _split_cores(cores: Sequence[int], learner: int, rollouts: Sequence[int]) -> list[frozenset[int] | None]:
    """A set of cores per process, the learner's first; all None when the threads outnumber the cores."""
    if learner + sum(rollouts) > len(cores):
        return [None] * (1 + len(rollouts))
    shares, begin = [], 0
    for size in (learner, *rollouts):
        shares.append(frozenset(cores[begin : begin + size]))
        begin += size
    return shares


def _split_gpus(gpus: Sequence[str], num_ranks: int, count: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Ranks take the first GPUs, rollouts one each of the rest, and go round over all of them when those run out."""
    if not gpus:
        return (), [()] * count
    learner = tuple(gpus[:num_ranks])
    rest = list(gpus[num_ranks:])
    pool = rest if len(rest) >= count else [*rest, *gpus]
    return learner, [(pool[i % len(pool)],) for i in range(count)]


def _environment(
    environ: Mapping[str, str], threads: int, gpus: Sequence[str], host_cores: Sequence[int] = ()
) -> dict[str, str]:
    env = {k: v for k, v in environ.items() if k not in (*RANK_VARIABLES, HOST_CORES) and not k.startswith("TORCHELASTIC_")}
    if host_cores:
        env[HOST_CORES] = ",".join(map(str, host_cores))
    env.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    env.update(PYTHONUNBUFFERED="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES=",".join(gpus))
    return env
