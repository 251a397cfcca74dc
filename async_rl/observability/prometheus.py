"""The run's numbers over HTTP, as Prometheus reads them.

Owns the endpoint, which answers on loopback only. Imports the sinks, and prometheus_client inside, for that is optional.
Invariant: numbers only. Names of metrics are made of letters, digits and underscores, and label values are words of this
program: no text of a prompt, an answer or a path can get out here. A scrape is served in a thread of its own.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from async_rl.observability.sinks import Row, scalars

HOST = "127.0.0.1"
PREFIX = "async_rl_"
REFRESH_S = 1.0  # live figures are computed at most this often, however many ask
MAX_NAME = 128


@dataclass(frozen=True)
class Figure:
    """A number, or one for each value of a label; names and label values are literals of the program, or sanitised."""

    name: str
    help: str
    values: Mapping[str, float]  # label value -> number; under "" the only one
    label: str = ""


class Endpoint:
    """A sink whose newest rows are there to be scraped, beside what `live` says at the time."""

    def __init__(self, port: int, live: Callable[[], list[Figure]]) -> None:
        """Port 0: any. Raises OSError when it is in use, ImportError without prometheus_client."""
        from prometheus_client import CollectorRegistry, start_http_server

        self._live = live
        self._figures: list[Figure] = []
        self._refreshed = -REFRESH_S
        self._rows: dict[str, dict[str, float]] = {}  # kind -> numbers of the newest row of this kind, by metric name
        self._lock = threading.Lock()
        registry = CollectorRegistry()
        registry.register(self)  # pyright: ignore[reportArgumentType]
        self._server, self._thread = start_http_server(port, HOST, registry)
        self.address = f"http://{HOST}:{self._server.server_port}/metrics"

    def write(self, row: Row) -> None:
        """The newest step's numbers, or the newest evaluation's."""
        kind = "step" if "reward/mean" in row else "eval"
        numbers: dict[str, float] = {}
        for key, value in scalars("", row):
            if kind == "step" or key.startswith("eval/"):  # an evaluation has the step, incarnation and time of its own
                numbers[metric_name(key, numbers)] = value
        with self._lock:
            self._rows[kind] = numbers

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client, once for each scrape."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            now = time.monotonic()
            if now - self._refreshed >= REFRESH_S:
                self._figures, self._refreshed = self._live(), now
            figures, rows = self._figures, list(self._rows.items())
        names = {PREFIX + figure.name for figure in figures}
        for figure in figures:
            family = GaugeMetricFamily(PREFIX + figure.name, figure.help, labels=[figure.label] if figure.label else None)
            for value, number in figure.values.items():
                family.add_metric([value] if figure.label else [], number)
            yield family
        for kind, numbers in rows:
            for name, number in numbers.items():
                if name not in names:  # a live figure is fresher
                    yield GaugeMetricFamily(name, f"Of the newest {kind} row.", value=number)


def metric_name(key: str, taken: Mapping[str, float]) -> str:
    """The key in the letters that a metric's name may have, and unlike those taken."""
    name = PREFIX + re.sub(r"[^a-zA-Z0-9]+", "_", key)[:MAX_NAME].strip("_").lower()
    alike = (f"{name}_{number}" for number in count(2))
    return name if name not in taken else next(other for other in alike if other not in taken)
