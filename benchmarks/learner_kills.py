"""Kill the learner again and again in one run; then ask record, metrics and books whether anything was lost or doubled.

Toy engine, two rollouts, two learner ranks, max_staleness 2, a record, and a data set small enough for several epochs. Each
kill (-9) falls at a random instant: on all ranks, on one of them, or on torchrun with them; after a new checkpoint exists,
except for a few, which fall before one. Rollouts are left alone and must be the same processes all along. Prints one JSON
object, ends with 0 if the audit holds; takes 15 to 30 s a kill.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from async_rl.config import Config, load_config
from async_rl.data.prompts import PromptStream
from async_rl.envs.tasks import build_prompts
from async_rl.envs.text import load_tokenizer
from async_rl.learner.report.recorder import BATCHES, RECORD, Recorded, read_record
from benchmarks.whole_runs import Command, end_in_order, kill, newest, steps, toy, whereabouts

GROUPS, EVERY, NUM_RANKS = 4, 5, 2
NUM_EARLY = 3  # kills before a new checkpoint, of 20
STEPS_PER_KILL = 15
TARGETS = ("all ranks", "all ranks", "one rank", "torchrun and ranks")
# Sampled by weights that were lost; or leased after the checkpoint, so that the group or the attempt is known to nobody.
LOST = ("lost_timeline", "unknown_group", "unknown_attempt")
MAX_DELAY_S = 2.0  # between the new checkpoint, or the resume, and the kill
TIMEOUT_S = 600.0
TOKEN_DELAY_S = 0.1  # so that training waits for sampling, and a kill finds groups on their way


def strike(run: Command, target: str, rng: random.Random) -> bool:
    """Whether something was killed."""
    ranks, torchrun = run.ranks(), run.pids("async_rl.learner.torchrun")
    if target == "one rank":
        ranks = rng.sample(ranks, min(1, len(ranks)))
    victims = [*torchrun, *ranks] if target == "torchrun and ranks" else ranks
    return kill(victims) > 0


def life(run: Command) -> int:
    """The learner's incarnation, once it has begun to train."""
    rows = steps(run.run_dir)
    return rows[-1]["incarnation"] if rows else 0


def torment(run: Command, num_kills: int, rng: random.Random) -> list[dict[str, Any]]:
    """What was killed, when."""
    early = set(rng.sample(range(1, num_kills), max(1, round(NUM_EARLY * num_kills / 20)))) if num_kills > 1 else set()
    done: list[dict[str, Any]] = []
    for k in range(num_kills):
        before, was = newest(run.run_dir), life(run)
        if k in early:
            run.wait_until("the next life to train", lambda was=was: life(run) > was or newest(run.run_dir) < 0)
            time.sleep(rng.uniform(0.0, 0.2))
        else:
            run.wait_until("a newer checkpoint", lambda before=before: newest(run.run_dir) > before)
            time.sleep(rng.uniform(0.0, MAX_DELAY_S))
        target, saved = rng.choice(TARGETS), newest(run.run_dir)
        run.wait_until(f"{target} to kill", lambda target=target: strike(run, target, rng))
        done.append({"target": target, "newest": saved, "early": saved == before})
        run.wait_until("the launcher to start it again", lambda k=k: run.output.read_text().count("starting it again") > k)
    return done


def audit(run_dir: Path, config: Config, result: dict[str, Any]) -> dict[str, Any]:
    """Counts that must be 0, or as told; every group's prompt by the order in which prompts are dealt."""
    prompts = build_prompts(config, load_tokenizer(config.model)).train
    stream = PromptStream(prompts, config.seed)
    record = [entry for entry in read_record(run_dir / RECORD / BATCHES) if isinstance(entry, Recorded)]
    trained = [(each.group_id, each.prompt.prompt_id) for entry in record for each in entry.records]
    ledger, groups = result["ledger"], result["ledger"]["groups"]
    dealt = [stream.next().prompt_id for _ in range(groups["granted"])]
    twice = Counter((group_id // len(prompts), prompt_id) for group_id, prompt_id in trained)
    last = max(group_id for group_id, _ in trained)
    ids = Counter(group_id for group_id, _ in trained)
    fates = groups["trained"] + sum(groups["dropped"].values())
    return {
        "trained": groups["trained"],
        "expected": config.num_steps * config.groups_per_step,
        "in_record": len(trained),
        "steps": [row["step"] for row in steps(run_dir)] == list(range(1, config.num_steps + 1)),
        "versions": [entry.version for entry in record] == list(range(config.num_steps)),
        "lost": groups["granted"] - fates,
        "doubled": sum(n - 1 for n in ids.values()),
        "prompts_twice_in_an_epoch": sum(n - 1 for n in twice.values()),
        "prompts_not_as_dealt": sum(dealt[group_id] != prompt_id for group_id, prompt_id in trained),
        "epochs": round(last / len(prompts), 1),
        "dropped": groups["dropped"],
        "refused_of_lost_timelines": {why: ledger["refused"].get(why, 0) for why in LOST},
        "balanced": ledger["balanced"],
        "lag_max": result["lag_max"],
    }


def holds(found: dict[str, Any]) -> bool:
    zero = ("lost", "doubled", "prompts_twice_in_an_epoch", "prompts_not_as_dealt")
    return (
        found["trained"] == found["expected"] == found["in_record"]
        and all(found[name] == 0 for name in zero)
        and found["steps"]
        and found["versions"]
        and found["balanced"]
        and found["lag_max"] <= 2
    )


def main(kills: int, seed: int) -> int:
    end_in_order()
    rng, started = random.Random(seed), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        num_steps = STEPS_PER_KILL * (kills + 1)
        own = ("rollout.count=2", f"learner.ranks={NUM_RANKS}", "max_staleness=2", "data.num_items=60", "record=true")
        saving = (f"checkpoint.every={EVERY}", f"num_steps={num_steps}", f"groups_per_step={GROUPS}", f"run_dir={run_dir}")
        with Command(run_dir, toy(Path(folder), *own, *saving), token_delay_s=TOKEN_DELAY_S) as run:
            run.wait_until("both rollouts", lambda: len(run.pids("async_rl.rollout")) >= 2 and steps(run_dir))
            before = {name: run.pids("async_rl.rollout", f"--name {name}") for name in ("rollout-0", "rollout-1")}
            done = torment(run, kills, rng)
            after = {name: run.pids("async_rl.rollout", f"--name {name}") for name in before}
            result = run.finish(TIMEOUT_S)
        found = audit(run_dir, load_config(run_dir / "config.yaml"), result)
        lives = len({row["incarnation"] for row in steps(run_dir)})
    same = before == after and all(before.values())
    refused = sum(found["refused_of_lost_timelines"].values())
    ok = holds(found) and same and len(done) == kills and refused >= 1
    kinds = Counter(each["target"] for each in done)
    said = {"ok": ok, "kills": len(done), "early": sum(each["early"] for each in done), "targets": kinds, "lives": lives}
    seconds = round(time.monotonic() - started)
    print(json.dumps(said | {"same_rollouts": same, **found, "seed": seed, "seconds": seconds, **whereabouts()}))
    return 0 if ok else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    sys.exit(main(**vars(parser.parse_args())))
