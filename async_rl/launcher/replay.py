"""`async-rl replay`: the learner of a recorded run alone, in a run folder of its own.

Imports launcher and config. Invariant: nothing in the folder of the recorded run is changed, and what a replay cannot have
(rollouts, evaluations, another record) is turned off, whatever its configuration says.
"""

from __future__ import annotations

from pathlib import Path

from async_rl.config import ConfigError, load_config
from async_rl.launcher import preflight
from async_rl.launcher.machine import find_machine
from async_rl.launcher.plan import make_plan
from async_rl.launcher.prepare import CONFIG, Prepared, Replay, resolve
from async_rl.launcher.train import run

BATCHES = Path("record") / "batches"
OFF = (
    "record=false",
    "rollout.count=0",
    "eval.draws=0",
    "eval.target=null",
    "checkpoint.keep_best=false",
    "model.make=null",
    "observe.metrics_port=null",
)


def replay(recorded: Path, out: Path, overrides: list[str]) -> int:
    """Run to the end of the record; returns the exit code. Raises ConfigError before anything is started."""
    record = recorded / BATCHES
    if out == recorded:
        raise ConfigError(f"--out is {out}, the folder of the recorded run: choose another")
    if not record.is_file():
        raise ConfigError(f"{recorded} holds no record: only a run with record=true can be replayed, once its learner is up")
    given = [override.split("=", 1)[0] for override in overrides]
    off = {"run_dir", *(setting.split("=", 1)[0] for setting in OFF)}
    if odd := [key for key in given if key in off]:
        raise ConfigError(
            f"{odd[0]} cannot be given to a replay, which has no rollouts, no evaluations and no sockets: leave it out"
        )
    config = load_config(recorded / CONFIG, [*overrides, *OFF, f"run_dir={out}"])
    machine = find_machine()
    plan = make_plan(config, out, machine)
    preflight.inspect_replay(config, plan, machine, out)
    return run(Prepared(resolve(config, out, plan), out, plan, machine, Replay(record, given)))
