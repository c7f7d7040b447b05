"""A sidecar's status page as Prometheus metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kalos_ctx.errors import InvalidArgument

if TYPE_CHECKING:
    from kalos_ctx._channel import StatusPage

STAGE_HELP = {
    "queue": "from a request's arrival to its turn",
    "sync": "looking the session's state up",
    "plan": "planning the window, recall included",
    "device": "gathering the tokens",
    "response": "writing the answer",
    "total": "from a request's arrival to its answer",
}


class StatusCollector:
    """Reads a status page whenever Prometheus asks.

    Parameters
    ----------
    status : StatusPage
        The sidecar's own, or one that a client mapped.
    """

    def __init__(self, status: StatusPage) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        """Give the metrics; prometheus_client calls it."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        found = self._status.read()
        yield GaugeMetricFamily(
            "kalos_ready", "1 where requests are answered", value=found["state"] == "ready"
        )
        yield GaugeMetricFamily(
            "kalos_started_seconds", "When it started, Unix time", value=found["started_at"]
        )
        for name, value in found["counts"].items():
            yield CounterMetricFamily(f"kalos_{name}", f"{name.replace('_', ' ')}", value=value)
        for name, value in found["gauges"].items():
            yield GaugeMetricFamily(f"kalos_{name}", f"{name.replace('_', ' ')} now", value=value)
        stages = HistogramMetricFamily(
            "kalos_stage_seconds",
            "Time by stage: " + "; ".join(f"{k}: {v}" for k, v in STAGE_HELP.items()),
            labels=["stage"],
        )
        for name, stage in found["stages"].items():
            stages.add_metric([name], histogram(stage["buckets"]), stage["sum_s"])
        yield stages


def histogram(buckets: list[int]) -> list[tuple[str, int]]:
    """Return cumulative counts by upper bound in seconds, as Prometheus has them.

    `buckets[b]` counts what took less than 2**b nanoseconds and did not fit the one before.
    """
    rows: list[tuple[str, int]] = []
    total = 0
    for b, count in enumerate(buckets[:-1]):
        total += count
        if b >= 8:  # below 256 ns nothing is told apart
            rows.append((repr(2.0**b / 1e9), total))
    return [*rows, ("+Inf", total + buckets[-1])]


def quantile(buckets: list[int], q: float) -> float | None:
    """Return a quantile in seconds from a stage's buckets, None where it counted nothing.

    The geometric middle of the bucket: right within a factor of 1.5.
    """
    wanted = q * sum(buckets)
    total = 0
    for b, count in enumerate(buckets):
        total += count
        if count and total >= wanted:
            return math.sqrt(2.0 ** max(b - 1, 0) * 2.0**b) / 1e9
    return None


class MetricsServer:
    """Serves the metrics over HTTP on the loopback interface.

    Parameters
    ----------
    status : StatusPage
    port : int
        0 picks a free one; `port` says which.

    Raises
    ------
    InvalidArgument
        prometheus-client is not installed, or the port is taken.
    """

    def __init__(self, status: StatusPage, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise InvalidArgument(
                "metrics need prometheus-client: pip install 'kalos-ctx[sidecar]'"
            ) from None
        registry = CollectorRegistry()
        registry.register(StatusCollector(status))
        try:
            self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        except OSError as error:
            raise InvalidArgument(
                f"port {port} cannot be used for metrics: {error.strerror}"
            ) from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
