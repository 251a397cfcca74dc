"""A whole run with keys beyond loopback: on an address of a network namespace that nobody else is in."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.transport.keys import make_keys

from .runs import QUICKSTART, ROOT, assert_books_balance, random_model

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(300)]
HOST = "10.99.0.1"
SETUP = f"ip link set lo up && ip addr add {HOST}/24 dev lo"  # not every kernel has dummy interfaces
UNSHARE = ("unshare", "--net", "--map-root-user")


def _unshared(script: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """`script`, then the command, in a network of their own; all of it ends with this call."""
    command = [*UNSHARE, "sh", "-c", f'{script} && exec "$@"', "sh", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, start_new_session=True)


def test_a_run_with_keys_on_an_address_beyond_loopback(tmp_path: Path) -> None:
    if not (shutil.which("unshare") and shutil.which("ip")) or _unshared(SETUP, "true").returncode:
        pytest.skip("this machine gives no network namespace")
    make_keys(tmp_path / "keys")
    argv = [sys.executable, "-m", "async_rl", "train", str(QUICKSTART), f"run_dir={tmp_path / 'run'}"]
    overrides = ["rollout.engine=toy", "model.make=null", "groups_per_step=4", "eval.draws=8", "eval.every=0", "num_steps=4"]
    overrides += [f"model.path={random_model(tmp_path / 'model')}", f"transport.host={HOST}"]
    refused = _unshared(SETUP, *argv, *overrides)
    assert refused.returncode == 2 and "make them with `async-rl keys DIR`" in refused.stderr
    done = _unshared(SETUP, *argv, *overrides, f"transport.keys={tmp_path / 'keys'}")
    assert done.returncode == 0, done.stderr
    assert_books_balance(json.loads(done.stdout.splitlines()[-1]), trained=16)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not [name for row in rows for name in row if "malformed" in name]
