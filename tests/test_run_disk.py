"""A disk that is full for real: checkpoints on a small tmpfs, in a mount namespace of its own; and kills within a save."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from async_rl.learner.checkpoints.checkpoint import Checkpointer, problem_of, step_of

from .runs import Run, assert_books_balance, random_model, train

TOY = ("rollout.engine=toy", "model.make=null", "groups_per_step=4", "rollout.num_slots=4", "eval.draws=0")
SIZE_MB, NUM_KILLS = 24, 25  # a checkpoint has 8 MB; two are there while one replaces the other
MOUNT = f'mount -t tmpfs -o size={SIZE_MB}m tmpfs "$0" && exec "$@"'
torch.set_num_threads(1)


def on_small_disk(folder: Path) -> tuple[str, ...]:
    """A command before another, which then sees a small tmpfs in that folder, and nobody else does."""
    folder.mkdir(parents=True)
    through = ("unshare", "--mount", "sh", "-c", MOUNT, str(folder))
    tried = subprocess.run([*through, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"NOT TESTED: A DISK THAT IS FULL FOR REAL. Nothing can be mounted here: {tried.stderr.strip()}")
    return through


def version(run: Run) -> int:
    steps = run.steps()
    return steps[-1]["version"] if steps else 0


@pytest.mark.process
@pytest.mark.timeout(400)
def test_a_disk_that_fills_at_a_save_costs_that_checkpoint_alone_and_space_that_comes_back_is_used(tmp_path: Path) -> None:
    checkpoints, model = tmp_path / "run" / "checkpoints", random_model(tmp_path / "model")
    saving = (
        f"model.path={model}",
        "num_steps=60",
        "checkpoint.every=2",
        "checkpoint.keep=1",
        "checkpoint.max_failed_saves=100",
    )
    with train(tmp_path, *TOY, *saving, through=on_small_disk(checkpoints)) as run:
        inside = Path(f"/proc/{run.popen.pid}/root{checkpoints}")
        run.wait_until("a checkpoint", (inside / "latest").exists, 200)
        assert not list(checkpoints.iterdir()), "it is on the small disk"
        free = os.statvfs(inside)
        (inside / "filler").write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - (4 << 20))))
        run.wait_until("the failure", lambda: "failed (1 in a row)" in run.text(), 60)
        at = version(run)
        run.wait_until("steps all the same", lambda: version(run) >= at + 3, 60)
        kept = [folder for folder in inside.glob("step_*") if not problem_of(folder)]
        assert kept and max(map(step_of, kept)) <= at, "the one from before is whole"
        (inside / "filler").unlink()
        newest = max(map(step_of, kept))
        run.wait_until("a newer one", lambda: f"step_{newest:06d}" not in (inside / "latest").read_text(), 60)
        result = run.finish(200)
    assert "No space left on device" in run.text() and "older ones are intact" in run.text()
    assert "Traceback" not in run.text()
    assert [row["step"] for row in run.steps()] == list(range(1, 61))
    assert_books_balance(result, trained=240)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {f"model.{name}": torch.full((20_000,), float(step)) for name in "abc"}


def save_for_ever(directory: Path, told: Connection) -> None:
    """Writes a byte to `told` before the first save, and after each."""
    checkpointer = Checkpointer(directory, keep=1)
    latest = checkpointer.latest_complete()
    assert latest
    step = step_of(latest)
    while True:
        told.send_bytes(b"x")
        step += 1
        checkpointer.save(step, tensors(step), str(step).encode())


@pytest.mark.timeout(300)
def test_at_whatever_instant_a_save_is_killed_the_newest_complete_checkpoint_loads(tmp_path: Path) -> None:
    directory, rng, found = tmp_path / "checkpoints", random.Random(3), [0]
    cleanly = multiprocessing.get_context("forkserver")  # a fork of this process could inherit a lock that a thread holds
    cleanly.set_forkserver_preload([__name__])
    begin = time.monotonic()
    Checkpointer(directory, keep=1).save(0, tensors(0), b"0")
    took_s, cut = time.monotonic() - begin, 0
    for _ in range(NUM_KILLS):
        heard, told = cleanly.Pipe(duplex=False)
        child = cleanly.Process(target=save_for_ever, args=(directory, told), daemon=True)
        child.start()
        told.close()
        for _ in range(1 + rng.randint(0, 2)):
            assert heard.poll(60.0), "no save within 60 s"
            heard.recv_bytes()
        time.sleep(rng.uniform(0.0, took_s))
        child.kill()
        child.join(10)
        assert child.exitcode == -signal.SIGKILL
        heard.close()
        cut += any(directory.glob(".step_*"))
        again = Checkpointer(directory, keep=1)
        newest = again.latest_complete()
        assert newest is not None and again.skipped == []
        found.append(step_of(newest))
        held = tensors(-1)
        assert again.load(newest, held) == str(found[-1]).encode()
        assert all((tensor == found[-1]).all() for tensor in held.values())
        assert not list(directory.glob(".step_*")), "what was cut short is gone"
    assert found == sorted(found) and found[-1] > NUM_KILLS // 2, "none goes back"
    assert cut > NUM_KILLS // 3, "most kills fell within a save"
