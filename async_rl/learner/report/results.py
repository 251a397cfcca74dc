"""The run in one JSON object, computed from the metrics files and the books: what `train` prints last.

Pure over rows, so that a resumed run reports all of itself. Invariant: every figure can be recomputed from the files; a row
that lacks a figure, or holds something else in its place, is left out of that figure.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from async_rl.learner.update.gate import Phase

ENDS = 5  # steps averaged for the first and the last reward
MAX_KINDS = 16  # of answers that could not be used
LAST_EVALS = 3  # evaluations whose median is `eval_last`; never the first, unless it is the only one


def summarize(
    rows: list[dict[str, Any]], books: dict[str, Any], invalid: Mapping[int, Mapping[str, int]] | None = None
) -> dict[str, Any]:
    """First and last reward and scores, answers that could not be used, held-out accuracy before and after, lag, throughput,
    idle time and the ledger. `invalid` has the counts of a life of the learner, by incarnation, beyond its last step."""
    steps = [row for row in rows if "reward/mean" in row]
    evals = [row for row in rows if _is_number(row.get("eval/accuracy"))]
    accuracies = [row["eval/accuracy"] for row in evals]
    rewards = _numbers(steps, "reward/mean")
    tokens = sum(_numbers(steps, "batch/num_tokens"))
    samples = sum(_numbers(steps, "batch/num_samples"))
    step_s = sum(_numbers(steps, "time/step_s"))  # a kill may have cut a row's timing off
    lagged = [row for row in steps if _is_number(row.get("lag/mean")) and _is_number(row.get("batch/num_tokens"))]
    hists = [row["lag/hist"] for row in steps if isinstance(row.get("lag/hist"), list)]
    unusable = _unusable(steps, invalid or {})
    return {
        "steps": len(steps),
        "policy_version": next(reversed(_numbers(steps, "version")), 0),
        "reward_first": _mean(rewards[:ENDS]),
        "reward_last": _mean(rewards[-ENDS:]),
        "scores": {name: {"first": _mean(x[:ENDS]), "last": _mean(x[-ENDS:])} for name, x in _by_name(steps, "score/").items()},
        "num_invalid": sum(unusable.values()),
        "invalid": unusable,
        "eval_first": accuracies[0] if accuracies else None,
        "eval_last": statistics.median(accuracies[1:][-LAST_EVALS:] or accuracies) if accuracies else None,
        "evals": [[row.get("eval/version"), row["eval/accuracy"]] for row in evals],
        "eval_unscored": sum(_numbers(rows, "eval/unscored")),
        "lag_mean": sum(row["lag/mean"] * row["batch/num_tokens"] for row in lagged) / tokens if tokens else None,
        "lag_max": max(_numbers(steps, "lag/max"), default=None),
        "lag_hist": [sum(column) for column in zip_longest(*hists, fillvalue=0)],
        "mismatch_abs_lag0": _mean(_numbers(steps, "mismatch/abs_lag0")),
        "samples_per_s": samples / step_s if step_s else None,
        "tokens_per_s": tokens / step_s if step_s else None,
        "steps_s": step_s,
        "idle_s": {k: sum(_numbers(steps, f"idle/{k}_s")) for k in ("batch", "publish", "eval", "save", "gate")},
        "kl_pauses": sum(state == Phase.PAUSED for state in _numbers(steps, "kl_gate/state")),
        "ledger": books,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _numbers(rows: list[dict[str, Any]], key: str) -> list[Any]:
    return [row[key] for row in rows if _is_number(row.get(key))]


def _by_name(steps: list[dict[str, Any]], prefix: str) -> dict[str, list[float]]:
    """The values of all keys with this prefix, step after step, where there is one."""
    found: dict[str, list[float]] = {}
    for row in steps:
        for key, value in row.items():
            if key.startswith(prefix) and _is_number(value):
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
