"""Stand-ins for the programs that `train` starts, run as real processes: `launcher_fakes.py ROLE MODE RUN_DIR`.

Roles: `launcher MODE_OF_LEARNER MODE_OF_ROLLOUT RUN_DIR` supervises the two others with the real launcher.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from async_rl.observability.process import EXIT_LOST_RANK, PARENT_PID, die_with_parent
from async_rl.observability.status import StatusFile


def launcher(learner_mode: str, rollout_mode: str, run_dir: str) -> int:
    # imported here, so that the stand-ins start at once
    from async_rl.config import parse_config
    from async_rl.launcher.plan import Machine, Plan, ProcessSpec, log_path
    from async_rl.launcher.prepare import Prepared
    from async_rl.launcher.train import run

    folder = Path(run_dir)
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    config = parse_config({"num_steps": 1, "groups_per_step": 1, "group_size": 2, "model": {"path": str(model)}})

    def spec(name: str, role: str, mode: str) -> ProcessSpec:
        argv = (sys.executable, __file__, role, mode, run_dir)
        return ProcessSpec(name, argv, dict(os.environ), log_path(folder, name), None, ())

    plan = Plan(spec("learner", "learner", learner_mode), (spec("rollout-0", "rollout", rollout_mode),))
    return run(Prepared(config, folder, plan, Machine((0,), (), os.environ)))


def learner(mode: str, run_dir: str) -> int:
    folder = Path(run_dir)
    note(folder, "learner")
    if mode == "torchrun":  # like torchrun: the work is done by a child in a session of its own
        env = {**os.environ, PARENT_PID: str(os.getpid())}
        rank = subprocess.Popen([sys.executable, __file__, "learner", "stoppable", run_dir], env=env, start_new_session=True)
        return rank.wait()
    if mode == "stoppable":
        return stoppable(folder)
    if mode == "too_young":  # Python's own start, interrupted
        signal.signal(signal.SIGINT, lambda *_: (print("Traceback\n  noise\nKeyboardInterrupt", file=sys.stderr), os._exit(1)))
        note(folder, "rank")
        time.sleep(60)
    if mode == "deaf":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(60)
    if mode == "fails":
        time.sleep(0.3)
        print("Traceback: noise\nlearner: the loss is not finite in 5 steps in a row", file=sys.stderr)
        return 4
    if mode == "fails_and_says":
        time.sleep(0.3)
        sentence = "the loss is not finite in 5 steps in a row"
        print(f"learner: {sentence}", file=sys.stderr)
        (folder / "result.json").write_text(json.dumps({"status": "failed", "exit_code": 4, "reason": sentence}))
        return 4
    if mode == "refuses":
        time.sleep(0.3)
        print("learner: data.path is absent", file=sys.stderr)
        return 2
    if mode.startswith("killed"):
        killed(mode, folder)
    if mode == "loses_a_rank" and not (folder / "checkpoints").exists():
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "latest").write_text("step_000001\n")
        return EXIT_LOST_RANK
    await_rollouts(mode, folder)
    print("step 1/1", flush=True)
    (folder / "result.json").write_text(json.dumps({"reward_last": 1.0}, indent=1))
    (folder / "end").touch()
    return 0


def killed(mode: str, folder: Path) -> None:
    """Some lives end here."""
    lives = len(list(folder.glob("learner.*")))
    if (mode == "killed_once" and lives == 1) or (mode == "killed_often" and lives < 7) or mode == "killed_in_vain":
        (folder / "checkpoints").mkdir(exist_ok=True)
        number = lives if mode == "killed_often" else 1
        (folder / "checkpoints" / "latest").write_text(f"step_{number:06d}\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "killed_unnamed" and lives == 1:
        (folder / "checkpoints" / "step_000040").mkdir(parents=True)
        (folder / "checkpoints" / "latest").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "killed_at_once":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "killed_with_rollout" and lives == 1:
        wait_for(lambda: bool(list(folder.glob("rollout.*"))))
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "latest").write_bytes(b"\xff")  # damaged, by whatever killed them: only its presence counts
        for path in folder.glob("rollout.*"):
            os.kill(int(path.suffix[1:]), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def await_rollouts(mode: str, folder: Path) -> None:
    if mode == "waits_for_six_rollouts":
        wait_for(lambda: len(list(folder.glob("rollout.*"))) >= 6)
    if mode == "has_another":
        status = StatusFile(folder, "learner-0")
        member = {"id": "mine#4", "process": "mine", "pid": 1, "state": "sampling", "weights": "1:0", "leases": 2}
        status.look = lambda: {"members": [member | {"heartbeat_age_s": 0.1, "core_age_s": 0.1}]}
        status.write()
        wait_for(lambda: len(list(folder.glob("rollout.*"))) >= 2)
        time.sleep(3.0)
    if mode in ("waits_for_second_rollout", "killed_with_rollout"):
        wait_for(lambda: len(list(folder.glob("rollout.*"))) >= 2)


def stoppable(folder: Path) -> int:
    """A rank: notes every signal it hears, takes a moment to save, and ends as a learner that was asked to."""
    die_with_parent()
    heard: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: heard.append(n))
    note(folder, "rank")
    wait_for(lambda: bool(heard))
    time.sleep(0.5)
    (folder / "heard.json").write_text(json.dumps(heard))
    return 128 + heard[0]


def rollout(mode: str, run_dir: str) -> int:
    folder = Path(run_dir)
    note(folder, "rollout")
    if mode == "delivers_and_breaks":
        status = StatusFile(folder, "rollout-0")
        status.look = lambda: {"delivered": 1}
        status.write()
        time.sleep(2.5)
        print("rollout: the engine core died", file=sys.stderr)
        return 1
    if mode == "breaks":
        print("loading\nrollout: the engine refuses this model", file=sys.stderr)
        return 1
    if mode == "killed_once" and len(list(folder.glob("rollout.*"))) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "with_helper":  # an engine core that hears no SIGTERM, in a session of its own
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        helper = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        (folder / "helper").write_text(str(helper.pid))
        time.sleep(60)
    wait_for((folder / "end").exists)
    return 0


def note(folder: Path, role: str) -> None:
    """Leave a file per life of a process, with its pid in the name."""
    (folder / f"{role}.{os.getpid()}").touch()


def wait_for(true, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    sys.exit({"launcher": launcher, "learner": learner, "rollout": rollout}[role](*arguments))
