"""Is a resumed run the run that was never interrupted? Replays of a recorded live run, compared with it and with each other.

`live`: a replay against the live run it was recorded from: weights, moments, RNG, the gate, the normaliser, what sizes groups,
and metrics.jsonl, bit for bit (incarnation and evaluations apart). `killed`: a replay whose learner is killed (-9) at random
instants and that is stopped once by SIGTERM, against the one that was not. `ranks`: one that goes on with another number of
ranks, to 1e-6. All with one rank and with two. PPO with a critic, a KL that steers itself, normalised rewards, groups sized by
difficulty. Prints one JSON object and ends with 0 if all of it is so; takes minutes, most of them starts of processes.
`--short`: one rank, one kill.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgpack
import torch

from benchmarks.whole_runs import Command, end_in_order, kill, newest, steps, tensors, toy, whereabouts

NUM_STEPS, EVERY = 12, 3
TOLERANCE = 1e-6
TIMEOUT_S = 400.0
METHOD = (
    "algorithm=ppo",
    "algorithm.kl.beta=0.05",
    "algorithm.kl.target=0.2",
    "algorithm.normalizer=debiased_ema",
    "adaptive_group_sizes=[4,12]",
    "learner.lr=1e-5",
)
RUN = (f"num_steps={NUM_STEPS}", f"checkpoint.every={EVERY}", "checkpoint.keep=100")


def live(folder: Path, num_ranks: int) -> Path:
    """A recorded run."""
    run_dir = folder / f"live{num_ranks}"
    overrides = (*METHOD, *RUN, "record=true", f"learner.ranks={num_ranks}", f"run_dir={run_dir}")
    with Command(run_dir, toy(folder, *overrides)) as run:
        run.finish(TIMEOUT_S)
    return run_dir


def replay(recorded: Path, out: Path, *overrides: str) -> Command:
    return Command(out, ["replay", str(recorded), "--out", str(out), *overrides])


def whole(recorded: Path, name: str) -> Path:
    out = recorded.with_name(name)
    with replay(recorded, out) as command:
        command.finish(TIMEOUT_S)
    return out


def interrupted(recorded: Path, name: str, num_kills: int, stop: bool, rng: random.Random) -> tuple[Path, int]:
    """Killed so often at random instants after its first checkpoint, then stopped once, then to its end."""
    out, done = recorded.with_name(name), 0
    with replay(recorded, out) as command:
        for _ in range(num_kills):
            before = newest(out)
            command.wait_until("a newer checkpoint", lambda before=before: newest(out) > before)
            time.sleep(rng.uniform(0.0, 0.3))
            done += bool(kill(command.ranks()))
        if stop:
            before = newest(out)
            command.wait_until("a newer checkpoint", lambda: newest(out) > before)
            command.popen.send_signal(signal.SIGTERM)
            command.finish(TIMEOUT_S, 128 + signal.SIGTERM)
        else:
            command.finish(TIMEOUT_S)
    if stop:
        with replay(recorded, out) as command:
            command.finish(TIMEOUT_S)
    return out, done


def on_other_ranks(recorded: Path, name: str, num_ranks: int) -> Path:
    """Stopped after a checkpoint, and gone on with so many ranks."""
    out = recorded.with_name(name)
    with replay(recorded, out) as command:
        command.wait_until("a checkpoint", lambda: newest(out) >= EVERY)
        command.popen.send_signal(signal.SIGTERM)
        command.finish(TIMEOUT_S, 128 + signal.SIGTERM)
    with replay(recorded, out, f"learner.ranks={num_ranks}") as command:
        command.finish(TIMEOUT_S)
    return out


def final(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step_{NUM_STEPS:06d}"


def state(run_dir: Path) -> dict[str, Any]:
    """Of rank 0's part, what a replay has, too."""
    held = msgpack.unpackb((final(run_dir) / "state.msgpack").read_bytes(), strict_map_key=False)
    return {name: held[name] for name in ("version", "gate", "shaping")} | {"sizes": held["dealer"]["sizes"]}


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "incarnation"} for row in steps(run_dir)]


def difference(a: Path, b: Path) -> dict[str, Any]:
    """Between two ends: the largest absolute one in any tensor, by kind; names of what is not the same bit for bit."""
    ours, theirs = tensors(final(a)), tensors(final(b))
    common = [name for name in ours if name in theirs]
    largest: dict[str, float] = {}
    for name in common:
        off = (ours[name].double() - theirs[name].double()).abs().max().item() if ours[name].numel() else 0.0
        kind = name.split(".")[0]
        largest[kind] = max(largest.get(kind, 0.0), off)
    odd = [name for name in common if not torch.equal(ours[name], theirs[name])]
    odd += sorted(name for name in ours.keys() ^ theirs.keys() if not name.startswith("rng."))
    odd += ["state"] * (state(a) != state(b)) + ["metrics.jsonl"] * (rows(a) != rows(b))
    return {"equal": not odd, "differs": odd[:5], "largest": largest}


def close(found: dict[str, Any]) -> bool:
    """To rounding: the weights and moments of both models."""
    return all(off <= TOLERANCE for kind, off in found["largest"].items() if kind != "rng")


def compare(folder: Path, num_ranks: int, num_kills: int, rng: random.Random) -> dict[str, Any]:
    recorded = live(folder, num_ranks)
    uninterrupted = whole(recorded, f"whole{num_ranks}")
    broken, killed = interrupted(recorded, f"broken{num_ranks}", num_kills, True, rng)
    other = on_other_ranks(recorded, f"other{num_ranks}", 3 - num_ranks)
    found = {
        "live": difference(recorded, uninterrupted),
        "killed": difference(uninterrupted, broken)
        | {"kills": killed, "incarnations": len({r["incarnation"] for r in steps(broken)})},
        "ranks": difference(uninterrupted, other),
    }
    found["ok"] = found["live"]["equal"] and found["killed"]["equal"] and killed == num_kills and close(found["ranks"])
    return found


def main(short: bool, seed: int) -> int:
    end_in_order()
    rng, started = random.Random(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if short:
            recorded = live(Path(folder), 1)
            broken, killed = interrupted(recorded, "broken", 1, False, rng)
            found: dict[str, Any] = {"1": difference(recorded, broken) | {"kills": killed}}
            found["1"]["ok"] = found["1"]["equal"] and killed == 1
        else:
            found = {str(n): compare(Path(folder), n, 2, rng) for n in (1, 2)}
        num_rows = len(rows(Path(folder) / "live1"))
    ok = all(each["ok"] for each in found.values()) and num_rows == NUM_STEPS
    seconds = round(time.monotonic() - started)
    print(json.dumps({"ok": ok, "ranks": found, "steps": num_rows, "seed": seed, "seconds": seconds, **whereabouts()}))
    return 0 if ok else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    sys.exit(main(**vars(parser.parse_args())))
