"""The report of a run: `report.png` and `report.html` beside `metrics.jsonl` and `timing.jsonl`, from which both are made.

Imports matplotlib inside. Invariant: any state of a run folder gives a report, also a run that was killed, is still going,
or has no row at all; what is missing is said, not guessed.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_rl.observability.files import replace_file
from async_rl.observability.log import get_logger
from async_rl.observability.sinks import read_run

log = get_logger(__name__)

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em;color:#222}
img{max-width:100%} table{border-collapse:collapse;margin:1em 0} td,th{padding:.2em .8em .2em 0;text-align:left;
border-bottom:1px solid #ddd;vertical-align:top} td{font-variant-numeric:tabular-nums} h1{font-size:1.4em}
"""


def write_report(run_dir: Path) -> Path:
    """Write `report.png` and the self-contained `report.html`; returns the path of the latter.

    Without matplotlib, or without rows, there is no figure and the page says so. Raises OSError when the folder cannot be
    written.
    """
    rows = read_run(run_dir)
    result = _read_result(run_dir / "result.json")
    why_no_figure = _draw(rows, run_dir / "report.png")
    if why_no_figure:
        log.warning("no figure in the report of %s: %s", run_dir, why_no_figure)
        figure = f"<p>No figure: {html.escape(why_no_figure)}.</p>"
    else:
        encoded = base64.b64encode((run_dir / "report.png").read_bytes()).decode()
        figure = f'<img alt="reward, held-out accuracy, lag, throughput, waiting" src="data:image/png;base64,{encoded}">'
    page = run_dir / "report.html"
    replace_file(page, _page(run_dir.name, _headline(rows, result), figure, result).encode())
    return page


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def _headline(rows: list[dict[str, Any]], result: Mapping[str, Any]) -> str:
    steps = [row["step"] for row in rows if "reward/mean" in row and "step" in row]
    done = f"{len(steps)} steps in the metrics, the last is {steps[-1]}" if steps else "No step in the metrics"
    if not result:
        return f"{done}. The run has not ended, or was killed: there is no result.json."
    return f"{done}. Status: {result.get('status', 'unknown')} ({result.get('reason', 'no reason given')})."


def _page(name: str, headline: str, figure: str, result: Mapping[str, Any]) -> str:
    table = _table(result) if result else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(name)}</title><style>{STYLE}</style>"
        f"<h1>Run {html.escape(name)}</h1><p>{html.escape(headline)}</p>{figure}{table}</html>\n"
    )


def _table(values: Mapping[str, Any]) -> str:
    """Nested mappings, such as the books, become nested tables."""
    lines = "".join(f"<tr><th>{html.escape(str(key))}<td>{_cell(value)}" for key, value in values.items())
    return f"<table>{lines}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return _table(value) if value else "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    return html.escape(json.dumps(value) if isinstance(value, list) else str(value))


def _draw(rows: list[dict[str, Any]], path: Path) -> str:
    """Draw the figure; returns why there is none, or ""."""
    path.unlink(missing_ok=True)  # of an earlier, other state of the run
    steps = [row for row in rows if "reward/mean" in row]
    if not rows:
        return "metrics.jsonl is absent or empty"
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as e:
        return f"matplotlib cannot be imported ({e}): install the extra [report]"
    figure = Figure(figsize=(11, 7), dpi=90)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.06, right=0.98, bottom=0.07, top=0.95, hspace=0.28, wspace=0.14)
    learning, lag, speed, waits = figure.subplots(2, 2).flat
    _line(learning, steps, "reward/mean", "reward, mean of the batch")
    _line(learning, [row for row in rows if "eval/accuracy" in row], "eval/accuracy", "held-out accuracy, greedy", "o-")
    _line(lag, steps, "lag/mean", "lag, mean of the tokens")
    _line(lag, steps, "lag/max", "lag, largest", ".")
    _line(speed, steps, "rollout/tokens_per_s", "tokens/s, generated")
    _line(waits, steps, "time/step_s", "a step, s")
    for key in sorted({key for row in steps for key in row if key.startswith("idle/")} - {"idle/learner_s"}):
        _line(waits, steps, key, f"of which waiting: {key.removeprefix('idle/').removesuffix('_s')}", ".-")
    for axes, title in ((learning, "Learning"), (lag, "Lag, versions"), (speed, "Throughput"), (waits, "Time")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
        if axes is not learning:
            axes.set_ylim(bottom=0)
    figure.savefig(path)
    return ""


def _line(axes: Any, rows: list[dict[str, Any]], key: str, label: str, style: str = "-") -> None:
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float) and "step" in row]
    if points:
        axes.plot(*zip(*points, strict=True), style, label=label, markersize=4, linewidth=1.3)
