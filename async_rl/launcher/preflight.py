"""What can be known about a run before anything starts: paths, ports, devices, memory, reward, data set.

Imports config, launcher and envs; loads neither model nor engine. Every complaint is a ConfigError, one sentence.
"""

from __future__ import annotations

import errno
import importlib.util
import re
import socket
import tempfile
from pathlib import Path

from async_rl.config import Config, ConfigError, DataConfig
from async_rl.envs.base import TaskError
from async_rl.envs.tasks import check_items, check_sides, examples
from async_rl.launcher import memory
from async_rl.launcher.datasets import check_dataset
from async_rl.launcher.folder import check_folder
from async_rl.launcher.hub import why_no_hub
from async_rl.launcher.machine import memory_limits, model_size
from async_rl.launcher.plan import Machine, Plan
from async_rl.launcher.rewards import check_fit, check_reward
from async_rl.transport.keys import read_learner_keys, read_rollout_keys

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
NUM_PORTS = 2  # control, data


def inspect(config: Config, plan: Plan, machine: Machine, run_dir: Path) -> None:
    """Raises ConfigError for the first thing that would keep this run from starting."""
    check_model(config)
    check_critic(config)
    check_reward(config.data.reward)
    check_data(config.data)
    check_tasks(config)
    check_devices(config, plan, machine)
    check_memory(config, plan, machine)
    check_keys(config)
    check_ports(config)
    check_metrics_port(config)
    check_run_dir(run_dir)


def inspect_replay(config: Config, plan: Plan, machine: Machine, run_dir: Path) -> None:
    """The same for one without rollouts, data and sockets."""
    check_model(config)
    check_critic(config)
    check_devices(config, plan, machine)
    check_memory(config, plan, machine)
    check_run_dir(run_dir)


def check_model(config: Config) -> None:
    path = Path(config.model.path)
    if path.is_dir():
        check_folder(path)
    elif path.exists():
        raise ConfigError(f"model.path is {path}, which is no folder: give a Hugging Face model folder")
    elif config.model.make is None and not _is_hub_name(config.model.path):
        raise ConfigError(
            f"model.path is {path}, which does not exist: give a Hugging Face folder or a hub name, "
            "or set model.make to a recipe (tiny, smollm2)"
        )
    elif config.model.make is None and (why := why_no_hub(config.model.path)):
        raise ConfigError(
            f"model.path is {path}, which is no folder here, and its name cannot be looked up on the hub ({why}): "
            "give the path of a Hugging Face folder"
        )


def check_critic(config: Config) -> None:
    """Only whether its model is there: what is wrong with it, the learner says."""
    path = config.algorithm.critic.path
    if config.algorithm.has_critic and path is not None and not Path(path).is_dir() and not _is_hub_name(path):
        raise ConfigError(f"algorithm.critic.path is {path}, which is no folder: give a Hugging Face folder or a hub name")


def _is_hub_name(text: str) -> bool:
    """Whether a name that is no path here may be a model on the hub: at most one slash, after something that is no folder."""
    parent = text.split("/")[0]
    if parent in (".", "..", "models"):  # "models" is reserved on the hub, and where the recipes put theirs
        return False
    return bool(HUB_NAME.fullmatch(text)) and not ("/" in text and Path(parent).exists())


def check_data(data: DataConfig) -> None:
    try:
        check_items(data)
    except TaskError as e:
        raise ConfigError(str(e)) from None
    if data.path is None:
        check_dataset(data)


def check_tasks(config: Config) -> None:
    """Whether there is a prompt to train on and one to evaluate, and whether the reward takes what they bring."""
    try:
        check_fit(config.data.reward, examples(config.data))
        check_sides(config)
    except TaskError as e:
        raise ConfigError(str(e)) from None


def check_devices(config: Config, plan: Plan, machine: Machine) -> None:
    num_gpus, ranks = len(machine.gpus), config.learner.ranks
    if config.learner.device == "cuda" and not num_gpus:
        raise ConfigError(
            "learner.device is cuda, but no GPU is visible: use learner.device=cpu, or check CUDA_VISIBLE_DEVICES"
        )
    if num_gpus and config.learner.device != "cpu" and ranks > num_gpus:
        raise ConfigError(f"learner.ranks is {ranks}, but only {num_gpus} GPUs are visible: lower it to {num_gpus}")
    if config.weights.backend == "nccl" and (not plan.learner.gpus or plan.shares_gpu):
        raise ConfigError(
            f"weights.backend is nccl, which needs a GPU for each of {ranks} ranks and {config.rollout.count} rollouts, "
            f"but {num_gpus} are visible: use weights.backend=gloo"
        )


def check_memory(config: Config, plan: Plan, machine: Machine) -> None:
    """Only for a model whose size is known: one on the hub, or not made yet, is let through."""
    demand = _demand(config, plan)
    if demand is not None and (sentence := memory.problem(demand, memory_limits(machine))):
        raise ConfigError(sentence)


def check_keys(config: Config) -> None:
    if config.transport.keys is None:
        return
    folder = Path(config.transport.keys)
    learner = read_learner_keys(folder)
    if not config.rollout.count:  # rollouts started by hand, with key folders of their own
        return
    rollout = read_rollout_keys(folder)
    if rollout.learner != learner.own.public or rollout.own.public not in learner.known:
        raise ConfigError(
            f"transport.keys is {folder}, where learner.key and learner.key_secret are no pair, or rollouts/ does not hold "
            "rollout.key: copy what is missing, or make a new folder with `async-rl keys DIR`"
        )


def check_ports(config: Config) -> None:
    host, first = config.transport.host, config.transport.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        raise ConfigError(f"transport.host is {host}, which does not resolve ({e.strerror}): use 127.0.0.1") from None
    for port in range(first, first + NUM_PORTS) if first else (0,):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address[0], port))
            except (OSError, OverflowError) as e:
                if isinstance(e, OSError) and e.errno == errno.EADDRNOTAVAIL:
                    raise ConfigError(
                        f"transport.host is {host}, which is no address of this machine: use one that is"
                    ) from None
                reason = getattr(e, "strerror", None) or str(e)
                raise ConfigError(
                    f"transport.port is {first}, but {host}:{port} cannot be bound ({reason}): choose another, or 0 for any"
                ) from None


def check_metrics_port(config: Config) -> None:
    port, first = config.observe.metrics_port, config.transport.port
    if port is None:
        return
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError("observe.metrics_port needs the package prometheus_client: install async-rl[report], or leave it out")
    if port and first and port in range(first, first + NUM_PORTS):
        raise ConfigError(f"observe.metrics_port is {port}, which transport.port={first} takes: choose another, or 0 for any")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as e:
            raise ConfigError(
                f"observe.metrics_port is {port}, but 127.0.0.1:{port} cannot be bound ({e.strerror}): choose another, or 0"
            ) from None


def check_run_dir(run_dir: Path) -> None:
    """It, or the nearest folder above it that exists, must be a folder that can be written; nothing is created."""
    try:
        nearest = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    except (OSError, ValueError) as e:  # too long, or with a zero byte
        raise ConfigError(f"run_dir is {str(run_dir)[:60]}..., which cannot be a path ({e}): choose another"[:300]) from None
    if not nearest.is_dir():
        raise ConfigError(f"run_dir is {run_dir}, but {nearest} is no folder: choose another")
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as e:
        raise ConfigError(f"run_dir is {run_dir}, but {nearest} cannot be written ({e.strerror}): choose another") from None


def summary(config: Config, plan: Plan, machine: Machine, run_dir: Path) -> str:
    """What would run, for a person."""
    c, recipe = config, config.model.make
    made = f" (made by the recipe '{recipe}' first)" if recipe and not Path(c.model.path).exists() else ""
    copies = f" in {c.learner.replicas} replicas" if c.learner.replicas > 1 else ""
    learner = f"{c.learner.ranks} rank{'s' * (c.learner.ranks > 1)}{copies} on {_where(plan.learner.gpus, plan.learner.cores)}"
    rollouts = [f"{r.name}: {c.rollout.engine} on {_where(r.gpus, r.cores)}" for r in plan.rollouts]
    if not rollouts:
        rollouts = ["none: rollout.count is 0; start them by hand with `async-rl rollout RUN_DIR --name NAME`"]
    rows = [
        ("model", f"{c.model.path}{made}"),
        ("data", f"{c.data.path or c.data.dataset}, scored by {c.data.reward}"),
        ("learner", f"{learner}, lr {c.learner.lr:g}"),
        ("algorithm", _methods(c)),
        *(("rollout", text) for text in rollouts),
        *(("memory", text) for text in _memory(config, plan, machine)),
        ("batch", f"{_groups(c)}, {c.num_steps} steps"),
        ("staleness", f"at most {c.max_staleness} versions, on_stale={c.on_stale}, in-flight updates: {c.weights.in_flight}"),
        ("run_dir", str(run_dir)),
    ]
    return "\n".join(f"  {name:<10} {text}" for name, text in rows)


def _methods(c: Config) -> str:
    """The mix, whatever preset it is from."""
    a = c.algorithm
    parts = [f"advantage {a.advantage}", f"loss {a.loss}", f"correction {a.correction}"]
    parts += [f"masks {', '.join(a.masks)}"] * bool(a.masks)
    parts += [f"critic lr {a.critic.lr:g}"] * a.has_critic
    parts += [f"KL beta {a.kl.beta:g} in {a.kl.into}"] * (a.kl.beta > 0)
    parts += [f"KL gate {a.kl.gate:g}, then {a.kl.gate_action}"] if a.kl.gate is not None else []
    parts += [f"{a.num_epochs} x {a.num_minibatches} optimizer steps a batch"] * (a.num_epochs * a.num_minibatches > 1)
    return f"{a.preset or 'by its keys'}: " + "; ".join(parts)


def _groups(c: Config) -> str:
    end, sizes = c.group_size_end, c.adaptive_group_sizes
    later = f", in the end {c.groups_per_step * c.group_size // end} x {end}" if end else ""
    range_ = f" ({sizes[0]} to {sizes[1]}, by prompt)" if sizes else ""
    greedy = " and a greedy one" if c.algorithm.has_greedy else ""
    return f"{c.groups_per_step} prompts x {c.group_size} answers{range_}{later}{greedy}"


def _memory(config: Config, plan: Plan, machine: Machine) -> list[str]:
    demand = _demand(config, plan)
    if demand is None:
        return [f"not estimated: the size of {config.model.path} is not known here yet"]
    lines, critic = memory.lines(demand, memory_limits(machine)), config.algorithm.critic.path
    if config.algorithm.has_critic and critic is not None and model_size(Path(critic)) is None:
        lines.append(f"not estimated: the critic, as the size of {critic} is not known here yet")
    return lines


def _demand(config: Config, plan: Plan) -> memory.Demand | None:
    """None when the policy's size is not known; a critic of unknown size is left out."""
    size = model_size(Path(config.model.path))
    if size is None:
        return None
    critic = config.algorithm.critic.path
    return memory.estimate(config, plan, size, model_size(Path(critic)) if critic else size)


def _where(gpus: tuple[str, ...], cores: frozenset[int] | None) -> str:
    place = f"GPU {','.join(gpus)}" if gpus else "CPU"
    return f"{place}, core{'s' * (len(cores) > 1)} {','.join(map(str, sorted(cores)))}" if cores else place
