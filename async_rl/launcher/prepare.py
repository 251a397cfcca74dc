"""From a config file to a run folder that every process can read, and to the model it names.

Imports config and launcher. Invariant: what `config.yaml` in the run folder says is what every process of the run reads;
paths in it are absolute, so it holds from any working directory. One launcher at a time owns a run folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from async_rl.config import Config, ConfigError, load_config, parse_config
from async_rl.launcher import preflight
from async_rl.launcher.machine import find_machine
from async_rl.launcher.plan import Machine, Plan, ProcessSpec, log_path, make_plan
from async_rl.observability.files import read_run_id, replace_file
from async_rl.observability.finished import REPLAY, RESULT, steps_done

CONFIG = "config.yaml"
UNSET = "(unset)"
PREVIOUS = "result.previous.json"  # so that the last run's result is never taken for the next one's, and is not lost either


@dataclass(frozen=True)
class Replay:
    """What the learner shall train on instead of rollouts: a record, and which keys were given for it by hand."""

    record: Path
    given: list[str]


@dataclass
class Prepared:
    """A checked run: its configuration as all processes will read it, its folder, and who runs."""

    config: Config
    run_dir: Path
    plan: Plan
    machine: Machine
    replay: Replay | None = None


def prepare(config_path: str, overrides: list[str]) -> Prepared:
    """Load, check, plan; writes nothing. Raises ConfigError."""
    config = load_config(config_path, overrides)
    run_dir = Path(config.run_dir or Path("runs") / Path(config_path).stem / time.strftime("%Y%m%d-%H%M%S")).absolute()
    machine = find_machine()
    plan = make_plan(config, run_dir, machine)
    preflight.inspect(config, plan, machine, run_dir)
    return Prepared(resolve(config, run_dir, plan), run_dir, plan, machine)


def resolve(config: Config, run_dir: Path, plan: Plan) -> Config:
    """Settle what depends on this host: absolute paths, and the weights' backend for the GPUs the plan gives out."""
    tree = config.model_dump(mode="json")
    tree["run_dir"] = str(run_dir)
    if config.model.make or Path(config.model.path).exists():
        tree["model"]["path"] = str(Path(config.model.path).absolute())
    for section, key in (("data", "path"), ("data", "heldout_path"), ("transport", "keys")):
        if tree[section][key] is not None:
            tree[section][key] = str(Path(tree[section][key]).absolute())
    if config.weights.backend == "auto":
        tree["weights"]["backend"] = "nccl" if plan.own_gpus else "gloo"
    return parse_config(tree)


def claim(prepared: Prepared) -> tuple[IO[str], str]:
    """Make the run folder ours and write what the processes read; the returned lock is held while it stays open. The text
    says what is different from the run that the folder holds already, if it holds one.

    Raises ConfigError when another launcher holds the folder, or when the run in it has done all its steps. The run id of a
    folder stays what it was.
    """
    run_dir = prepared.run_dir
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as e:
        raise ConfigError(f"run_dir is {run_dir}, which cannot be made ({e.strerror}): choose another") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"run_dir is {run_dir}, where another run is at work: choose another, or wait for it") from None
    try:
        if (run_dir / "run.json").exists():
            read_run_id(run_dir)
        _check_kind(prepared)
        news = _news(prepared)
        _begin(prepared)
    except ConfigError:
        lock.close()
        raise
    return lock, news


def _begin(prepared: Prepared) -> None:
    """Write what the processes read; when that fails the folder says of its last run what it said. Raises ConfigError."""
    run_dir = prepared.run_dir
    try:
        if not (run_dir / "run.json").exists():
            replace_file(run_dir / "run.json", json.dumps({"run_id": secrets.token_hex(8)}).encode())
        if prepared.replay:
            order = {"record": str(prepared.replay.record), "given": prepared.replay.given}
            replace_file(run_dir / REPLAY, json.dumps(order).encode())
        text = yaml.safe_dump(prepared.config.model_dump(mode="json"), sort_keys=False)
        replace_file(run_dir / CONFIG, text.encode())
        if (run_dir / RESULT).exists():
            (run_dir / RESULT).replace(run_dir / PREVIOUS)
    except OSError as e:
        raise ConfigError(
            f"run_dir is {run_dir}, where {Path(e.filename).name} cannot be written ({e.strerror}): free space there, or "
            "choose another"
        ) from None


class Before:
    """What a run folder says of its last run, to be put back when the next one is refused before it has begun."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._config = (run_dir / CONFIG).read_bytes() if (run_dir / CONFIG).is_file() else None
        self._has_result = (run_dir / RESULT).is_file()

    def put_back(self) -> None:
        """Raises ConfigError when the disk does not let it."""
        try:
            if self._has_result:
                (self._run_dir / PREVIOUS).replace(self._run_dir / RESULT)
            if self._config is not None:
                replace_file(self._run_dir / CONFIG, self._config)
        except OSError as e:
            raise ConfigError(
                f"run_dir is {self._run_dir}, where {e.filename} could not be put back as the last run had it ({e.strerror}): "
                "free space, and give that run's configuration again when it goes on"
            ) from None


def _check_kind(prepared: Prepared) -> None:
    """A run goes on in the folder of a run, a replay in that of a replay of the same record."""
    run_dir, asked = prepared.run_dir, prepared.replay
    if asked is None:
        if (run_dir / REPLAY).exists():
            raise ConfigError(f"run_dir is {run_dir}, which holds a replay: choose another for a run")
        return
    if not (run_dir / REPLAY).exists():
        if (run_dir / CONFIG).exists():
            raise ConfigError(f"--out is {run_dir}, which holds a run: choose another for a replay")
        return
    try:
        record = json.loads((run_dir / REPLAY).read_text())["record"]
    except (OSError, ValueError, LookupError, TypeError):
        record = "something that cannot be read"
    if record != str(asked.record):
        raise ConfigError(f"--out is {run_dir}, which holds a replay of {record}: choose another for one of {asked.record}")


def _news(prepared: Prepared) -> str:
    """How this run goes on with what the folder holds."""
    run_dir, config = prepared.run_dir, prepared.config
    done = steps_done(run_dir)
    if config.checkpoint.resume and done >= config.num_steps:
        raise ConfigError(
            f"run_dir is {run_dir}, where a run has finished its {done} steps: raise num_steps to go on, or choose another"
        )
    try:
        before = parse_config(yaml.safe_load((run_dir / CONFIG).read_text()))
    except (OSError, ValueError, yaml.YAMLError, ConfigError):
        return ""
    return f", which holds a run already; changed since: {', '.join(changes(before, config)) or 'nothing'}"


def changes(before: Config, after: Config) -> list[str]:
    """One "key old -> new" for each that differs; a method's options and masks come and go with it."""
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    keys = [key for key in new | old if key != "run_dir" and old.get(key, UNSET) != new.get(key, UNSET)]
    return [f"{key} {old.get(key, UNSET)} -> {new.get(key, UNSET)}" for key in keys]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and key != "options" else {prefix + key: value}
    return flat


def model_recipe(prepared: Prepared) -> ProcessSpec | None:
    """The process that makes the model, beside its final place, or None when the model is there or needs no making."""
    model = prepared.config.model
    if model.make is None or Path(model.path).exists():
        return None
    out = unfinished(prepared)
    argv = (sys.executable, "-m", "async_rl", "model", model.make, "--out", str(out), "--seed", str(prepared.config.seed))
    env = {**prepared.machine.environ, "PYTHONUNBUFFERED": "1"}
    return ProcessSpec("model", argv, env, log_path(prepared.run_dir, "model"), None, ())


def unfinished(prepared: Prepared) -> Path:
    """Where a model is made before it is moved into place, so that a half-made one is never taken for a model."""
    path = Path(prepared.config.model.path)
    return path.with_name(f".{path.name}.{os.getpid()}")


def install_model(prepared: Prepared) -> None:
    """Move the finished model into place; one that another run made meanwhile is as good."""
    out, path = unfinished(prepared), Path(prepared.config.model.path)
    try:
        out.rename(path)
    except OSError:
        if not path.is_dir():
            raise
        shutil.rmtree(out, ignore_errors=True)
