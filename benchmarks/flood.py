"""What strangers cost a run: step time and the learner's memory while 100,000 bad messages a minute come in, and without them.

A whole run on loopback (toy engine, random tiny model), once with keys and once without. A process of its own floods both
ports in windows of a few seconds, every other one, so that both kinds of window see the same machine. It shares the cores with
the run, as a stranger on the same host would; what it takes for itself is part of the ratio. Prints one line of JSON and exits
with 1 when a target is missed; takes about three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from async_rl.observability.sinks import read_run
from async_rl.transport.keys import make_keys, read_rollout_keys
from async_rl.transport.messages import Heartbeat
from async_rl.transport.zmq import ZmqLink
from async_rl.types import Attempt, Group, Trajectory
from benchmarks.algorithms import commit, machine
from benchmarks.whole_runs import ROOT, Command, end_in_order, toy

WINDOW_S, NUM_WINDOWS = 5.0, 8  # of each kind
SETTLE_S = 0.7  # at the beginning of a window, not counted
TARGETS = {"median": 1.2, "p95": 1.5, "rss_mib": 64, "accepted": 0}
MAX_BYTES = 1 << 20


# ---- what is replayed


def record(control: str, data: str, keys: Path | None) -> dict[str, str]:
    """The bytes by which a rollout says a heartbeat and delivers a group, as somebody on the way would see them."""
    own = read_rollout_keys(keys) if keys else None
    with _on_the_way(control) as (near, said), _on_the_way(data) as (near_data, delivered):

        async def visit() -> None:
            link = ZmqLink(near, max_message_bytes=MAX_BYTES, keys=own)
            link.open_data(near_data)
            await asyncio.wait_for(link.send(Heartbeat(phase="recorded")), 20)
            await asyncio.wait_for(link.push(_group()), 20)
            await asyncio.sleep(1.0)
            link.close(2)

        asyncio.run(visit())
        return {"DEALER": said().hex(), "PUSH": delivered().hex()}


def _group() -> Group:
    """One that nobody was granted."""
    ids, mask = np.arange(4, dtype=np.int32), np.ones(4, bool)
    sibling = Trajectory(ids, -np.ones(4, np.float32), ids * 0 + 1, ids * 0, mask, "stop", 1.0, "", {})
    return Group(4242, Attempt(2, 1), "train", "rollout-0#1", ids, (sibling,) * 3)


@contextmanager
def _on_the_way(address: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """An address that leads to the other one, and what went there."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    seen = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    def carry() -> None:
        near = listener.accept()[0]
        far = socket.create_connection((host, int(port)))
        try:
            while True:
                for source in select.select([near, far], [], [])[0]:
                    if not (piece := source.recv(1 << 16)):
                        return
                    if source is near:
                        seen.extend(piece)
                    (far if source is near else near).sendall(piece)
        except OSError:
            return
        finally:
            near.close()
            far.close()

    threading.Thread(target=carry, daemon=True).start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", lambda: bytes(seen)
    listener.close()


# ---- the run and the windows


def measured(folder: Path, keys: Path | None) -> dict[str, Any]:
    """One part: a run, its windows, and what the flood got for its pains."""
    run_dir, port = folder / "run", free_pair()  # given, so that the data port is known
    own = (f"run_dir={run_dir}", f"transport.port={port}", *([f"transport.keys={keys}"] if keys else []))
    with Command(run_dir, toy(folder, "num_steps=100000", "checkpoint.every=0", *own)) as run:
        run.wait_until("step 10", lambda: len(steps(run_dir)) >= 10)
        control, data = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
        flood = _start(control, data, record(control, data, keys), keys)
        learner = max((psutil.Process(pid) for pid in run.ranks()), key=lambda p: p.memory_info().rss)
        times, rss = _windows(run_dir, flood, learner)
        sent = json.loads(flood.communicate("stop\n", timeout=30)[0])
        rows = [row for row in steps(run_dir) if "ledger" in row]  # the timings of the last one may still be to come
    return _part(times, rss, sent, rows)


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """With their timings, as far as these are written."""
    return [row for row in read_run(run_dir) if "reward/mean" in row]


def free_pair() -> int:
    """A port whose successor is free as well, by binding both for an instant."""
    for _ in range(50):
        with socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", 0))
            port = a.getsockname()[1]
            try:
                b.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise RuntimeError("no two free ports in a row")


def _start(control: str, data: str, replayed: dict[str, str], keys: Path | None) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "benchmarks.stranger", control, data, json.dumps(replayed)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if keys:
        env["LEARNER_KEY"] = read_rollout_keys(keys).learner.decode()  # it is no secret
    pipe = subprocess.PIPE
    popen = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    assert popen.stdout is not None and popen.stdout.readline() == "ready\n"
    return popen


def _windows(
    run_dir: Path, flood: subprocess.Popen[str], learner: psutil.Process
) -> tuple[dict[str, list[float]], list[float]]:
    """Step times by kind of window, and the learner's memory in MiB, first before any flood."""
    assert flood.stdin is not None
    times: dict[str, list[float]] = {"off": [], "on": []}
    rss: list[float] = [learner.memory_info().rss / 2**20]
    for word in ("off", "on") * NUM_WINDOWS:
        flood.stdin.write(word + "\n")
        flood.stdin.flush()
        time.sleep(SETTLE_S)
        begun = len(steps(run_dir))
        time.sleep(WINDOW_S - SETTLE_S)
        times[word] += [row["time/step_s"] for row in steps(run_dir)[begun + 1 :] if "time/step_s" in row]  # timings follow
        rss.append(learner.memory_info().rss / 2**20)
    return times, rss


def _part(times: dict[str, list[float]], rss: list[float], sent: dict[str, int], rows: list[dict[str, Any]]) -> dict[str, Any]:
    p95 = {word: statistics.quantiles(values, n=20)[-1] for word, values in times.items()}
    last = rows[-1]
    books, minutes = last["ledger"], NUM_WINDOWS * WINDOW_S / 60
    counted = {
        name.rpartition("/")[2]: n for name, n in last.items() if name.startswith(("events/malformed/", "events/refused/"))
    }
    return {
        "sent_per_min": {name: round(n / minutes) for name, n in sent.items()},
        "sent_per_min_all": round(sum(sent.values()) / minutes),
        "num_steps": {word: len(values) for word, values in times.items()},
        "step_s": {word: round(statistics.median(values), 4) for word, values in times.items()},
        "median_ratio": round(statistics.median(times["on"]) / statistics.median(times["off"]), 3),
        "p95_ratio": round(p95["on"] / p95["off"], 3),
        "rss_mib": [round(rss[0]), round(max(rss))],
        "rss_growth_mib": round(max(rss) - rss[0], 1),
        "accepted": last["events/joined"] - 1 + last["rollout/num_live"] - 1 + _unaccounted(books),
        "refused": counted,
    }


def _unaccounted(books: dict[str, Any]) -> int:
    """Groups that the ledger holds beyond those it has granted."""
    there = sum(books[name] for name in ("waiting", "leased", "ready", "taken", "trained")) + sum(books["dropped"].values())
    return abs(there - books["granted"])


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    end_in_order()
    parts = {}
    for name in ("keys", "no_keys"):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if name == "keys":
                make_keys(folder / "keys")
            parts[name] = measured(folder, folder / "keys" if name == "keys" else None)
    met = all(
        part["median_ratio"] <= TARGETS["median"]
        and part["p95_ratio"] <= TARGETS["p95"]
        and part["rss_growth_mib"] <= TARGETS["rss_mib"]
        and part["accepted"] == TARGETS["accepted"]
        and part["sent_per_min_all"] >= 100_000
        for part in parts.values()
    )
    print(json.dumps({**parts, "targets": TARGETS, "met": met, "commit": commit(), "machine": machine()}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
