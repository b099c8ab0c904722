"""The worker's figures as Prometheus metrics, beside SGLang's on ``GET /metrics``.

``python -m vericache_sglang.telemetry.metrics`` prints the README's table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import InvariantError
from vericache_sglang.telemetry.metrics_table import (
    ACCEPTED,
    BURST,
    TABLE,
    WIDTH,
    markdown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import CollectorRegistry

    from vericache_sglang.telemetry.metric import Metric
    from vericache_sglang.telemetry.record import IterationRecord

EVERY_SECONDS = 1.0
"""Least time between two readings of the report."""

TOKENS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Upper bounds of the histograms' buckets, in tokens; a draft has 256 at most."""


class Metrics:
    """See ``Observer``; publishes every metric of ``TABLE``.

    SGLang serves what several processes counted: it names their folder in
    ``PROMETHEUS_MULTIPROC_DIR`` before prometheus_client is imported. So this is made
    in the scheduler's process, after SGLang has started it with ``--enable-metrics``.

    Args:
        labels: Labels of every sample, as SGLang's own metrics have them.
        report: Returns the worker's counters and gauges; read here once, so that all
            metrics are there from the start.
        registry: Where the metrics are registered; None is prometheus_client's own.

    Raises:
        InvariantError: The report lacks a key of the table.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        report: Callable[[], Mapping[str, Any]],
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._report = report
        self._read_at = 0.0
        self._counters: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}
        self._counted: dict[str, float] = {}
        self._histograms: dict[str, Any] = {}
        told = report()
        # The rings' metrics are left out as a whole where the pacing has none.
        wanted = [m for m in TABLE if "ring_windows" in told or not m.rings]
        missing = {key for metric in wanted for key in metric.keys} - told.keys()
        if missing:
            raise InvariantError(f"metrics without a value: {sorted(missing)}")
        for metric in wanted:
            self._register(metric, labels, registry)
        self._accepted = self._histograms[ACCEPTED.name]
        self._width = self._histograms[WIDTH.name]
        self._burst = self._histograms[BURST.name]
        self.idle()

    def iteration(self, record: IterationRecord) -> None:
        """See ``Observer``; the report is read at most once a second."""
        for row in record.rows:
            if row.phase == "verify":
                self._accepted.observe(max(0, row.emitted - 1))
                self._width.observe(row.tokens)
                self._burst.observe(row.emitted)
        if record.ended - self._read_at >= EVERY_SECONDS:
            self._read_at = record.ended
            self.idle()

    def idle(self) -> None:
        """Publish the report as it is now; gauges would keep their last busy value."""
        values = self._report()
        for key, gauge in self._gauges.items():
            gauge.set(values[key])
        for key, counter in self._counters.items():
            counter.inc(values[key] - self._counted.get(key, 0))
            self._counted[key] = values[key]

    def close(self) -> None:
        """See ``Observer``."""
        self.idle()

    def _register(
        self,
        metric: Metric,
        labels: Mapping[str, str],
        registry: CollectorRegistry | None,
    ) -> None:
        # It reads the folder's name from the environment when it is first imported.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        names = [*labels, metric.label] if metric.label else [*labels]
        shared = (metric.name, metric.documentation, names)
        place = registry or REGISTRY
        if metric.kind == "histogram":
            histogram = Histogram(*shared, buckets=TOKENS, registry=place)
            self._histograms[metric.name] = histogram.labels(*labels.values())
            return
        family: Any
        if metric.kind == "counter":
            family, samples = Counter(*shared, registry=place), self._counters
        else:
            # "mostrecent" has no label for the process: there is one scheduler.
            family = Gauge(*shared, registry=place, multiprocess_mode="mostrecent")
            samples = self._gauges
        for value, key in metric.sources:
            own = (value,) if metric.label else ()
            samples[key] = family.labels(*labels.values(), *own)


if __name__ == "__main__":
    print(markdown())
