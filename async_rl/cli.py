"""The command `async-rl`. The one module that imports ours inside functions, so that --help answers at once.

Invariant: a user's mistake is one sentence on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from pathlib import Path

# An evaluation prints to a person's terminal, where a run has a log for what torch says of itself.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
EXIT_CODES = """\
exit codes: 0 done; 1 an engine died, or something unforeseen; 2 a mistake in the configuration or the command; 3 no rollout
is left, or a rollout cannot reach the learner; 4 training failed, no answer could be scored, or an evaluation was not answered
in time; 5 the books do not balance; 6 a learner rank was lost, and there is no checkpoint to go on from; 128 + n stopped by
signal n (130 is Ctrl-C)"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # the working directory, as with `python -m`: a reward of one's own lies there
    arguments = _arguments(argv)
    try:
        return arguments.command(arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as e:
        if not _is_users_mistake(e):
            raise
        print(f"async-rl: {e}", file=sys.stderr)
        return 2


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    """argparse ends a list of positionals at the first option: what stands behind it is put back here."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if any("overrides" not in arguments or word.startswith("-") for word in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="async-rl",
        description="Asynchronous reinforcement learning of language models: rollouts and a learner that never stop.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_runs(commands)
    _add_models(commands)
    return parser


def _add_runs(commands) -> None:
    """What begins, joins or looks at a run."""
    for name, command, text in (
        ("train", _train, "learner and rollouts on this host, to the end; the last line printed is JSON"),
        ("check", _check, "say what would run, or what is wrong; loads no model"),
    ):
        sub = _add(commands, name, command, text)
        sub.add_argument("config", metavar="CONFIG", help="YAML file, for example configs/quickstart.yaml")
        sub.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="for example num_steps=10")

    sub = _add(commands, "learner", _learner, "the learner of a run folder (under torchrun: one rank of it)")
    sub.add_argument("run_dir", metavar="RUN_DIR", help="folder with config.yaml and run.json")

    sub = _add(commands, "rollout", _rollout, "one more rollout for the run of this folder")
    sub.add_argument("run_dir", metavar="RUN_DIR", help="folder with config.yaml and learner.json")
    sub.add_argument("--name", required=True, metavar="NAME", help="its own within the run, for example rollout-7")

    sub = _add(
        commands, "replay", _replay, "train again on the batches that a run with record=true has taken, without rollouts"
    )
    sub.add_argument("run_dir", metavar="RUN_DIR", help="folder of the recorded run")
    sub.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="run folder of the replay; the same one goes on with it"
    )
    sub.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="for example learner.ranks=2")

    sub = _add(commands, "status", _status, "who is at work in a run, what each does and waits for, who is frozen or dead")
    sub.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run")
    sub.add_argument("--stacks", action="store_true", help="have every process of this host write its threads' stacks, too")

    sub = _add(commands, "keys", _keys, "a key folder for transport.keys, so that nobody else gets into a run")
    sub.add_argument("dir", metavar="DIR", type=Path, help="folder to make; must not exist")

    sub = _add(commands, "report", _report, "write the report of a run again from its metrics")
    sub.add_argument("run_dir", metavar="RUN_DIR", type=Path)


def _add_models(commands) -> None:
    """What makes, takes out or asks a model."""
    sub = _add(commands, "export", _export, "a checkpoint as a Hugging Face folder, also while the run goes on")
    sub.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run")
    sub.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write; must not exist")
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="of this step; by default the newest complete one")
    which.add_argument("--best", action="store_true", help="the one with the best held-out score (checkpoint.keep_best)")
    sub.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights written")

    sub = _add(commands, "eval", _eval, "greedy held-out accuracy of any model, counted as a run counts it")
    sub.add_argument("model", metavar="MODEL", help="a Hugging Face folder or a hub name; overrides model.path")
    sub.add_argument("config", metavar="CONFIG", help="YAML file: its held-out prompts, reward and lengths")
    sub.add_argument("overrides", metavar="key=value", nargs="*", help="for example eval.draws=128")
    sub.add_argument("--engine", choices=("vllm", "transformers"), default="vllm", help="by which the answers are made")

    sub = _add(commands, "model", _model, "make a model on the spot")
    sub.add_argument("recipe", choices=("tiny", "smollm2"), help="a small policy that adds numbers; SmolLM2-135M-Instruct")
    sub.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write; must not exist")
    sub.add_argument("--seed", type=int, default=0, metavar="N", help="of the tiny recipe")


def _add(commands, name: str, command, text: str) -> argparse.ArgumentParser:
    sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    sub.set_defaults(command=command)
    return sub


def _is_users_mistake(error: Exception) -> bool:
    from async_rl.config import ConfigError
    from async_rl.envs.base import TaskError
    from async_rl.learner import LearnerError

    too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    return too_long or isinstance(error, ConfigError | TaskError | LearnerError)


def _train(arguments: argparse.Namespace) -> int:
    from async_rl.launcher.train import train

    return train(arguments.config, arguments.overrides)


def _replay(arguments: argparse.Namespace) -> int:
    from async_rl.launcher.replay import replay

    return replay(_run_dir(arguments.run_dir), arguments.out.absolute(), arguments.overrides)


def _check(arguments: argparse.Namespace) -> int:
    from async_rl.launcher.preflight import summary
    from async_rl.launcher.prepare import prepare

    prepared = prepare(arguments.config, arguments.overrides)
    print(f"{arguments.config} is fine; `train` would run")
    print(summary(prepared.config, prepared.plan, prepared.machine, prepared.run_dir))
    return 0


def _learner(arguments: argparse.Namespace) -> int:
    run_dir = _run_dir(arguments.run_dir)
    if "RANK" in os.environ:
        from async_rl.learner.__main__ import main as learner_main

        return learner_main(str(run_dir))
    from async_rl.config import load_config
    from async_rl.launcher.plan import learner_argv

    _become(learner_argv(load_config(run_dir / "config.yaml").learner.ranks, run_dir))
    return 0


def _rollout(arguments: argparse.Namespace) -> int:
    from async_rl.config import ConfigError, load_config
    from async_rl.launcher.by_hand import check_name
    from async_rl.launcher.plan import rollout_argv
    from async_rl.observability.finished import nobody_left, steps_done

    run_dir = _run_dir(arguments.run_dir)
    done = steps_done(run_dir)
    config = load_config(run_dir / "config.yaml")
    if done >= config.num_steps:
        raise ConfigError(nobody_left(run_dir, done))
    check_name(run_dir, config, arguments.name)
    print(f"async-rl: {arguments.name} is starting; it joins when its engine is up", file=sys.stderr, flush=True)
    _become(rollout_argv(run_dir, arguments.name))
    return 0


def _become(argv: tuple[str, ...]) -> None:
    """Replace this process by the one that `train` would start."""
    sys.stdout.flush()
    os.execv(argv[0], argv)


def _export(arguments: argparse.Namespace) -> int:
    run_dir = _run_dir(arguments.run_dir)
    from async_rl.learner.checkpoints.export import export

    which = "best" if arguments.best else "newest" if arguments.step is None else arguments.step
    card = export(run_dir, arguments.out, which, arguments.dtype)
    print(json.dumps({"out": str(arguments.out), **card}))
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from async_rl.config import ConfigError, load_config
    from async_rl.launcher import preflight
    from async_rl.launcher.plan import THREAD_VARIABLES, evaluation_argv
    from async_rl.rollout.stopped import hold_back

    model = (f"model.path={json.dumps(arguments.model)}", "model.make=null")  # quoted: a name may look like a number
    overrides = (*arguments.overrides, *model)
    config = load_config(arguments.config, overrides)
    if config.eval.draws == 0:
        raise ConfigError("eval.draws is 0, so there is nothing to evaluate: set it, for example to 512")
    preflight.check_model(config)
    preflight.check_reward(config.data.reward)
    preflight.check_data(config.data)
    preflight.check_tasks(config)
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(config.rollout.threads)), TOKENIZERS_PARALLELISM="false")
    for variable, level in QUIET.items():
        os.environ.setdefault(variable, level)
    hold_back()
    _become(evaluation_argv(arguments.engine, arguments.config, overrides))
    return 0


def _model(arguments: argparse.Namespace) -> int:
    from async_rl.config import ConfigError

    if arguments.out.exists():
        raise ConfigError(f"--out is {arguments.out}, which exists: name a new folder, or remove that one first")
    # Threads that spin while they wait take what a busy machine has: six times slower at twice as many processes as cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if arguments.recipe == "tiny":
        from async_rl.recipes.tiny import make_tiny

        made = make_tiny(arguments.out, arguments.seed)
    else:
        from async_rl.recipes.smollm2 import make_smollm2

        made = make_smollm2(arguments.out)
    print(json.dumps(made))
    return 0


def _keys(arguments: argparse.Namespace) -> int:
    from async_rl.transport.keys import make_keys

    make_keys(arguments.dir)
    print(f"{arguments.dir} is a key folder: set transport.keys={arguments.dir}, and see docs/security.md for further rollouts")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from async_rl.config import ConfigError
    from async_rl.observability.report import write_report

    if not (arguments.run_dir / "metrics.jsonl").is_file():
        raise ConfigError(f"{arguments.run_dir} holds no metrics.jsonl: give the folder of a run that has trained")
    try:
        print(write_report(arguments.run_dir))
    except OSError as e:
        raise ConfigError(f"the report of {arguments.run_dir} cannot be written ({e.strerror}): free space there") from None
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from async_rl.launcher.status import status

    run_dir = Path(arguments.run_dir)
    if not (run_dir / "run.json").is_file():  # said here: the configuration takes longer to import than the rest to run
        print(f"async-rl: {run_dir} holds no run.json: give the folder of a run, as `async-rl train` makes it", file=sys.stderr)
        return 2
    print("\n".join(status(run_dir, arguments.stacks)))
    return 0


def _run_dir(text: str) -> Path:
    from async_rl.config import ConfigError

    run_dir = Path(text)
    for name in ("config.yaml", "run.json"):
        if not (run_dir / name).is_file():
            raise ConfigError(f"{run_dir} holds no {name}: give the folder of a run, as `async-rl train` makes it")
    return run_dir.absolute()
