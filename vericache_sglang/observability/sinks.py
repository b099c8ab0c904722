"""Creates the sinks of iterations: metrics if SGLang serves them, and a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import (
    get_disagg,
    get_observability,
    get_parallel,
    get_serving,
)

from vericache_sglang.observability.prometheus import Metrics
from vericache_sglang.observability.table import PUBLISHED
from vericache_sglang.observability.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.observability.record import Observer


def open_sinks(
    config: VeriCacheConfig, report: Callable[[], Mapping[str, Any]]
) -> dict[str, Observer]:
    """Return the sinks enabled by the settings of VeriCache and SGLang, by name.

    Args:
        config: Frozen settings.
        report: Returns the engine's counters and gauges.

    Raises:
        ConfigError: The trace's file cannot be written.
    """
    sinks: dict[str, Observer] = {}
    if get_observability().enable_metrics:
        rows = [row for row in PUBLISHED if row.source != "check"]
        sinks["metrics"] = Metrics(_labels(), report, rows)
    if config.trace != "off":
        rank = get_parallel().dp_rank
        most = config.trace_mb << 20
        sinks["trace"] = Trace(config.trace, "VeriCache", rank=rank, most_bytes=most)
    return sinks


def _labels() -> dict[str, str]:
    """Return the labels of SGLang's metrics (``SchedulerMetricsCollector``)."""
    parallel = get_parallel()
    labels = {
        "model_name": get_serving().served_model_name,
        "engine_type": DisaggregationMode.to_engine_type(
            get_disagg().disaggregation_mode
        ),
        "tp_rank": parallel.tp_rank,
        "pp_rank": parallel.pp_rank,
        "moe_ep_rank": parallel.moe_ep_rank,
    }
    if parallel.dp_rank is not None:
        labels["dp_rank"] = parallel.dp_rank
    labels.update(get_observability().extra_metric_labels or {})
    return {name: str(value) for name, value in labels.items()}
