"""However a run ends: none of its processes, ports, semaphores and temporary files is left (BR-093, BR-104)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from .runs import Run, random_model, rollout, train

pytestmark = [pytest.mark.process, pytest.mark.whole, pytest.mark.timeout(300)]
TOY = ("rollout.engine=toy", "model.make=null", "groups_per_step=4", "rollout.num_slots=4", "eval.draws=8", "eval.every=0")
LEFT_S = 10.0


class Stock:
    """What a run holds on this host. All of its processes are known by their TMPDIR, which is the test's own."""

    def __init__(self, temporary: Path) -> None:
        self.temporary = temporary
        self.ports: set[int] = set()
        self.shared: set[Path] = set()  # in /dev/shm

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = process.environ().get("TMPDIR", "").startswith(str(self.temporary))
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def take(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error, OSError):
                self.ports |= {c.laddr.port for c in process.net_connections() if c.status == psutil.CONN_LISTEN}
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self.shared |= {Path(name) for name in re.findall(r"/dev/shm/\S+", maps)}

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + LEFT_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [" ".join(process.cmdline())[:200] for process in left] == []
        while any(self.temporary.iterdir()) and time.monotonic() < deadline:  # removed by who is no process of the run
            time.sleep(0.05)
        assert [path.name for path in self.temporary.iterdir()] == []
        assert [path.name for path in self.shared if path.exists()] == []
        for port in self.ports:
            with socket.socket() as sock:
                assert sock.connect_ex(("127.0.0.1", port)) != 0, f"somebody listens on port {port}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"model.path={random_model(tmp_path_factory.mktemp('models') / 'random')}"


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stock:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    return Stock(temporary)


def _kill(run: Run, *words: str) -> None:
    os.kill(run.pids(*words)[0], signal.SIGKILL)


def _interrupt_twice(run: Run) -> None:
    run.popen.send_signal(signal.SIGINT)
    run.wait_until("the first to be heeded", lambda: "once more to kill everything" in run.text(), 20)
    run.popen.send_signal(signal.SIGINT)


ENDS: dict[str, tuple[Callable[[Run], None], int]] = {
    "a signal": (lambda run: run.popen.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
    "two interrupts": (_interrupt_twice, 128 + signal.SIGINT),
    "a killed launcher": (lambda run: run.popen.kill(), -signal.SIGKILL),
    "a killed torchrun": (lambda run: _kill(run, "async_rl.learner.torchrun"), 128 + signal.SIGKILL),
}


@pytest.mark.parametrize("end", ENDS)
def test_an_end_by_force_leaves_nothing(tmp_path: Path, model: str, stock: Stock, end: str) -> None:
    how, code = ENDS[end]
    with train(tmp_path, *TOY, model, "num_steps=100000", "checkpoint.every=0") as run:
        run.wait_until("a step", run.steps, 120)
        stock.take()
        how(run)
        assert run.popen.wait(60) == code
        stock.assert_nothing_left()
    assert len(stock.ports) >= 3 and stock.shared, "control, data and torchrun's; a scorer's locks"


def test_an_end_in_good_order_after_a_killed_rollout_leaves_nothing(
    tmp_path: Path, model: str, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNC_RL_TOY", '{"token_delay_s": 0.05}')
    with train(tmp_path, *TOY, model, "num_steps=120") as run:
        run.wait_until("a step", run.steps, 120)
        with rollout(run, "late") as late:
            run.wait_until("it to join", lambda: "late#" in run.text(), 120)
            stock.take()
            _kill(run, "async_rl.rollout", "rollout-0")
            run.wait_until("its next life", lambda: len(re.findall(r"rollout-0#\d+ joined", run.text())) == 2, 120)
            stock.take()
            run.finish(200)
            assert late.finish(20) == 0
        stock.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rollout", "core", "launcher"])
def test_vllm_leaves_nothing_when_a_process_is_killed(tmp_path: Path, model: str, stock: Stock, victim: str) -> None:
    settings = ("rollout.engine=vllm", "num_steps=100000", "checkpoint.every=0")
    with train(tmp_path, *TOY, *settings, model) as run:
        run.wait_until("a step", run.steps, 280)
        stock.take()
        assert [path.name[:4] for path in stock.temporary.glob("arl-*")] == ["arl-"]
        (engine,) = [p for p in stock.processes() if "EngineCore" in p.name() or "EngineCore" in "".join(p.cmdline())]
        pid = {"rollout": engine.ppid(), "core": engine.pid, "launcher": run.popen.pid}[victim]
        os.kill(pid, signal.SIGKILL)
        if victim == "launcher":
            run.popen.wait(10)
        else:
            run.wait_until("the launcher to notice", lambda: "starting it again" in run.text(), 60)
            run.popen.send_signal(signal.SIGTERM)
            assert run.popen.wait(120) == 128 + signal.SIGTERM
        stock.assert_nothing_left()


def test_a_scratch_folder_is_gone_with_a_killed_process_and_its_fork(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time; from async_rl.rollout.scratch import scratch_folder\n"
        "folder = scratch_folder('arl-'); open(folder + '/file', 'w').close(); pid = os.fork()\n"
        "if pid: print(folder, pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    argv = [sys.executable, "-c", program]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env) as process:
        assert process.stdout is not None
        folder, fork = process.stdout.readline().split()
        assert (Path(folder) / "file").exists()
        process.kill()
        process.wait(10)
        time.sleep(0.2)
        assert Path(folder).exists(), "the fork may still use it"
        os.kill(int(fork), signal.SIGKILL)
        deadline = time.monotonic() + 10
        while Path(folder).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path(folder).exists()
