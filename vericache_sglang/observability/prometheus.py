"""Publishes the table's figures as Prometheus metrics, with SGLang's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import InvariantError
from vericache_sglang.observability.table import PUBLISHED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prometheus_client import CollectorRegistry

    from vericache_sglang.observability.record import IterationRecord
    from vericache_sglang.observability.table import Figure

EVERY_SECONDS = 1.0
"""Least time between two reads of the report, in seconds."""

TOKENS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Upper bounds of the histograms' buckets, in tokens; drafts have at most 256."""


class Metrics:
    """An ``Observer`` that publishes rows of the table.

    SGLang serves the metrics of several processes from the folder that it sets in
    ``PROMETHEUS_MULTIPROC_DIR`` before prometheus_client is imported. Construct this
    class after SGLang has started the process with ``--enable-metrics``.

    Args:
        labels: Labels of every sample, equal to those of SGLang's metrics.
        report: Returns totals and gauges by key; called once on construction, so that
            all metrics exist from the start.
        rows: Rows of the table to publish.
        registry: Registry of the metrics; None: prometheus_client's default.

    Raises:
        InvariantError: The report lacks a key of ``rows``.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        report: Callable[[], Mapping[str, Any]],
        rows: Sequence[Figure] = PUBLISHED,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._report = report
        self._read_at = 0.0
        self._counters: list[tuple[str, Any]] = []
        self._gauges: list[tuple[str, Any]] = []
        self._counted: dict[str, float] = {}
        self._histograms: dict[str, Any] = {}
        found = report()
        # A pacing without rings publishes no metrics of rings.
        wanted = [row for row in rows if "ring_iterations" in found or not row.rings]
        needed = {
            key for row in wanted for key in (*row.samples.values(), *row.told.values())
        }
        missing = needed - found.keys()
        if missing:
            raise InvariantError(f"metrics without a value: {sorted(missing)}")
        for row in wanted:
            told = {name: str(found[key]) for name, key in row.told.items()}
            self._register(row, {**labels, **told}, registry)
        self.idle()

    def iteration(self, record: IterationRecord) -> None:
        """See ``Observer``; the report is read at most once a second."""
        for row in record.rows:
            if row.phase == "verify" and not row.discarded:
                observe = self._histograms
                observe["verification_accepted_tokens"](max(0, row.emitted - 1))
                observe["verification_width_tokens"](row.tokens)
                observe["burst_tokens"](row.emitted)
        if record.ended - self._read_at >= EVERY_SECONDS:
            self._read_at = record.ended
            self.idle()

    def idle(self) -> None:
        """Publish the report, so that gauges do not keep their last busy value."""
        values = self._report()
        for key, gauge in self._gauges:
            gauge.set(values[key])
        for key, counter in self._counters:
            counter.inc(values[key] - self._counted.get(key, 0))
        self._counted = {key: values[key] for key, _ in self._counters}

    def close(self) -> None:
        """See ``Observer``."""
        self.idle()

    def _register(
        self,
        row: Figure,
        labels: Mapping[str, str],
        registry: CollectorRegistry | None,
    ) -> None:
        # prometheus_client reads the folder from the environment on first import.
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        names = [*labels, row.label] if row.label else [*labels]
        shared = (row.name, row.documentation, names)
        place = registry or REGISTRY
        if row.kind == "histogram":
            histogram = Histogram(*shared, buckets=TOKENS, registry=place)
            self._histograms[row.metric] = histogram.labels(*labels.values()).observe
            return
        family: Any
        if row.kind == "counter":
            family, samples = Counter(*shared, registry=place), self._counters
        else:
            # "mostrecent" adds no process label: each gauge has one writer.
            family = Gauge(*shared, registry=place, multiprocess_mode="mostrecent")
            samples = self._gauges
        for value, key in row.samples.items():
            own = (value,) if row.label else ()
            samples.append((key, family.labels(*labels.values(), *own)))
