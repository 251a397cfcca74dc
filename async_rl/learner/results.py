"""The run in one JSON object, computed from the metrics files and the books: what `train` prints last.

Pure over rows, so that a resumed run reports all of itself. Invariant: every figure can be recomputed from the files.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

ENDS = 5  # steps averaged for the first and the last reward
MAX_KINDS = 16  # of answers that could not be used
LAST_EVALS = 3  # evaluations whose median is `eval_last`; never the first, unless it is the only one


def summarize(
    rows: list[dict[str, Any]], books: dict[str, Any], invalid: Mapping[int, Mapping[str, int]] | None = None
) -> dict[str, Any]:
    """First and last reward and scores, answers that could not be used, held-out accuracy before and after, lag, throughput,
    idle time and the ledger. `invalid` has the counts of a life of the learner, by incarnation, beyond its last step."""
    steps = [row for row in rows if "reward/mean" in row]
    evaluated = [row for row in rows if "eval/version" in row]
    evals = [row for row in evaluated if row.get("eval/accuracy") is not None]
    accuracies = [row["eval/accuracy"] for row in evals]
    rewards = [row["reward/mean"] for row in steps if row["reward/mean"] is not None]
    tokens = sum(row["batch/num_tokens"] for row in steps)
    samples = sum(row["batch/num_samples"] for row in steps)
    step_s = sum(row.get("time/step_s", 0.0) for row in steps)  # a kill may have cut the row's timing off
    unusable = _unusable(steps, invalid or {})
    return {
        "steps": len(steps),
        "policy_version": steps[-1]["version"] if steps else 0,
        "reward_first": _mean(rewards[:ENDS]),
        "reward_last": _mean(rewards[-ENDS:]),
        "scores": {name: {"first": _mean(x[:ENDS]), "last": _mean(x[-ENDS:])} for name, x in _by_name(steps, "score/").items()},
        "num_invalid": sum(unusable.values()),
        "invalid": unusable,
        "eval_first": accuracies[0] if accuracies else None,
        "eval_last": statistics.median(accuracies[1:][-LAST_EVALS:] or accuracies) if accuracies else None,
        "evals": [[row["eval/version"], row["eval/accuracy"]] for row in evals],
        "eval_unscored": sum(row.get("eval/unscored", 0) for row in evaluated),
        "lag_mean": sum(row["lag/mean"] * row["batch/num_tokens"] for row in steps) / tokens if tokens else None,
        "lag_max": max((row["lag/max"] for row in steps), default=None),
        "lag_hist": [sum(column) for column in zip_longest(*(row["lag/hist"] for row in steps), fillvalue=0)],
        "mismatch_abs_lag0": _mean([row["mismatch/abs_lag0"] for row in steps if row.get("mismatch/abs_lag0") is not None]),
        "samples_per_s": samples / step_s if step_s else None,
        "tokens_per_s": tokens / step_s if step_s else None,
        "steps_s": step_s,
        "idle_s": {k: sum(row.get(f"idle/{k}_s", 0.0) for row in steps) for k in ("batch", "publish", "eval", "save")},
        "ledger": books,
    }


def _by_name(steps: list[dict[str, Any]], prefix: str) -> dict[str, list[float]]:
    """The values of all keys with this prefix, step after step, where there is one."""
    found: dict[str, list[float]] = {}
    for row in steps:
        for key, value in row.items():
            if key.startswith(prefix) and value is not None:
                found.setdefault(key.removeprefix(prefix), []).append(value)
    return found


def _unusable(steps: list[dict[str, Any]], known: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    """Answers received that no step could use, by reason. Rows count them from the start of a life of the learner, so the last
    row of each life has all of it that is not known better."""
    last_of_life = {row.get("incarnation"): row for row in steps}
    counts: Counter[str] = Counter()
    for incarnation, row in last_of_life.items():
        if incarnation not in known:
            counts.update({reason: int(n[-1]) for reason, n in _by_name([row], "events/invalid/").items()})
    for life in known.values():
        counts.update(life)
    if len(counts) > MAX_KINDS:  # each life keeps to it; several together may not
        named = dict(counts.most_common(MAX_KINDS - 1))
        return named | {"other": counts.total() - sum(named.values()) + named.get("other", 0)}
    return dict(counts)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
