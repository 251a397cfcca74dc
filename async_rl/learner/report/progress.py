"""What the learner says of itself: one metrics row and one line per step, notices between them, the result at the end.

Owns the sinks of rank 0, the evaluations' samples and the clock of the run. Invariant: `metrics.jsonl` and `timing.jsonl`
are the source of truth; the terminal, the report and the result say nothing that is not in them or in the books.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config import Config
from async_rl.data.evaluation import Evaluation
from async_rl.learner.control.plane import ControlPlane
from async_rl.learner.control.publish import Publisher
from async_rl.learner.failure import RunFailed
from async_rl.learner.report.figures import figures
from async_rl.learner.report.recorder import RECORD
from async_rl.learner.report.results import summarize
from async_rl.learner.report.samples import Samples
from async_rl.observability.files import replace_file, set_aside
from async_rl.observability.log import get_logger
from async_rl.observability.prometheus import Endpoint
from async_rl.observability.sinks import METRICS, TIMING, Console, RunSink, Sink, TensorBoardSink, read_run

log = get_logger(__name__)
RATE_S = 10.0
SAMPLES = "samples"


class Progress:
    def __init__(
        self,
        config: Config,
        run_dir: Path,
        incarnation: int,
        resume_step: int | None,
        decode: Callable[[np.ndarray], str],
    ) -> None:
        self.run_dir, self.incarnation = run_dir, incarnation
        self.eval_draws = config.eval.draws
        self.evaluated = -1  # version of the newest evaluation begun
        self._console = Console(config.num_steps)
        self._max_failed = config.checkpoint.max_failed_saves
        self._failed = 0  # rows in a row that could not be written
        moved = set_aside(run_dir, (METRICS, TIMING, SAMPLES, RECORD)) if resume_step is None else []
        self._rows = RunSink(run_dir, resume_step)
        self._board: Sink | None = TensorBoardSink(run_dir / "tensorboard") if config.observe.tensorboard else None
        self._metrics_port = config.observe.metrics_port
        self._endpoint: Endpoint | None = None
        self._idle: dict[str, float] = defaultdict(float)  # seconds this step waited, by what for
        self._started = self._last = time.monotonic()
        self._generated: deque[tuple[float, int]] = deque([(self._started, 0)])  # (when, tokens) of the last RATE_S seconds
        self._lock = threading.Lock()  # notices come from the control thread, steps from the training thread
        self._samples = Samples(run_dir / SAMPLES, resume_step, decode, self.notice)
        if moved:
            self.notice(f"of an earlier life, which this run does not continue: now {', '.join(str(path) for path in moved)}")

    def notice(self, text: str) -> None:
        log.info("%s", text)
        with self._lock:
            self._console.notice(text)

    def serve(self, control: ControlPlane) -> None:
        """From now on the newest rows can be scraped, when the config says so; a run goes on without."""
        if self._metrics_port is None:
            return
        try:
            self._endpoint = Endpoint(self._metrics_port, partial(figures, control))
        except (OSError, ImportError) as e:
            why = getattr(e, "strerror", None) or e
            self.notice(f"metrics cannot be scraped: port {self._metrics_port} (observe.metrics_port): {why}")
        else:
            self.notice(f"metrics for Prometheus at {self._endpoint.address}")

    def waited(self, what: str, seconds: float) -> None:
        """Book time in which the training thread could not train: batch, publish, eval, save or gate."""
        self._idle[what] += seconds

    def step(self, version: int, metrics: dict[str, Any], control: ControlPlane, publisher: Publisher, skipped: str) -> None:
        """Write the row of one step; `skipped` says why it changed nothing."""
        now = time.monotonic()
        elapsed = max(now - self._last, 1e-9)
        with control.changed:
            row = {
                "step": version,
                "version": version,
                "incarnation": self.incarnation,
                "time_s": now - self._started,
                **metrics,
                **publisher.stats,
                "time/step_s": elapsed,
                "samples_per_s": metrics["batch/num_samples"] / elapsed,
                "rollout/tokens_per_s": self._rate(now, control.members.generated_tokens),
                "rollout/num_live": sum(m.live for m in control.members),
                "idle/learner_s": self._idle["batch"],
                **{f"idle/{what}_s": seconds for what, seconds in self._idle.items()},
                **{f"events/{name}": count for name, count in control.events.items()},
                "events/disconnects": control.hub.disconnects,
                **{f"events/malformed/{reason}": count for reason, count in control.hub.refused.items()},
                "ledger": control.ledger.books()["groups"],
            }
        if skipped:
            row["skipped"] = skipped
            self.notice(f"step after version {version} was skipped: {skipped}")
        self._last = now
        self._idle.clear()
        self._write(row)

    def _rate(self, now: float, tokens: int) -> float:
        """Tokens a second over the last RATE_S: rollouts report with their heartbeats, which may come less often than steps."""
        self._generated.append((now, tokens))
        while len(self._generated) > 2 and now - self._generated[1][0] > RATE_S:
            self._generated.popleft()
        since, before = self._generated[0]
        return max(0, tokens - before) / max(now - since, 1e-9)

    def evaluation(self, evaluation: Evaluation, seconds: float) -> None:
        version = evaluation.name.version
        row = {
            "step": version,
            "incarnation": self.incarnation,
            "time_s": time.monotonic() - self._started,
            "eval/seconds": seconds,
            **evaluation.row(),
        }
        self._write(row)
        self._samples.write(evaluation)
        self.notice(f"held-out accuracy of version {version}: {evaluation.summary()}, {seconds:.1f} s")

    def _write(self, row: dict[str, Any]) -> None:
        """Raises RunFailed when too many in a row could not be written."""
        trouble = ""
        with self._lock:
            try:
                self._rows.write(row)
            except OSError as e:
                trouble = f"{e.filename}: {e.strerror}"
            if "reward/mean" in row:
                self._console.step(row)
        self._show(row)
        self._failed = self._failed + 1 if trouble else 0
        if trouble:
            self.notice(f"a row could not be written ({self._failed} in a row), and is tried again with the next: {trouble}")
        if self._failed >= self._max_failed:
            raise RunFailed(
                4,
                f"{self._failed} rows in a row could not be written (checkpoint.max_failed_saves), the last to {trouble}; "
                "free space on its disk and start again",
            )

    def _show(self, row: dict[str, Any]) -> None:
        """TensorBoard's writer does not live on after an error; the run does."""
        if self._endpoint is not None:
            self._endpoint.write(row)
        if self._board is None:
            return
        try:
            self._board.write(row)
        except OSError as e:
            self._board = None
            self.notice(f"TensorBoard gets no more rows: {e.strerror or e}")

    def result(self, books: dict[str, Any], invalid: Mapping[str, int], **ending: Any) -> dict[str, Any]:
        """The final object, also written to `result.json`; `invalid` counts the answers of this life that were of no use.

        Raises OSError, which names the file that cannot be written.
        """
        self._samples.close()
        if self._endpoint is not None:
            self._endpoint.close()
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()
        self._rows.close()
        result = {
            **summarize(read_run(self.run_dir), books, {self.incarnation: invalid}),
            **ending,
            "run_dir": str(self.run_dir),
        }
        result["seconds"] = time.monotonic() - self._started
        replace_file(self.run_dir / "result.json", json.dumps(result).encode())
        return result
