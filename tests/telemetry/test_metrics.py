"""The table of metrics, and what is published from it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.engine.counters import Counters
from vericache_sglang.engine.stored_segments import store_report
from vericache_sglang.engine.tier_counters import TierCounters
from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.runtime import Runtime
from vericache_sglang.scheduling.settings import RuntimeSettings
from vericache_sglang.store.tally import StoreCounters
from vericache_sglang.telemetry.metrics import Metrics
from vericache_sglang.telemetry.metrics_table import TABLE, markdown
from vericache_sglang.telemetry.record import IterationRecord, RowRecord

prometheus_client = pytest.importorskip("prometheus_client")

ROOT = Path(__file__).parents[2]
LABELS = {"model_name": "demo", "tp_rank": "0"}

LIVE = {
    *("kept_slots", "staging_slots", "staging_bytes", "staging_tokens"),
    *("host_pinned_bytes", "eager_forwards"),
    *("host_used_bytes", "host_budget_bytes", "kv_read_bytes_per_s", "running"),
    *("shadow_checks", "shadow_mismatches", "shadow_dropped", "shadow_pending"),
    *("cache_device_tokens", "cache_host_tokens", "cache_host_bytes"),
    "cache_store_tokens",
    *("cache_complement_bytes", "cache_draft_slots", "cache_draft_slots_used"),
    *TierCounters().report(),
    *store_report(StoreCounters()),
}
"""Keys only a live worker reports; end_to_end/test_metrics.py compares with one."""

UNITS = {"seconds", "bytes", "slots", "ratio", "tokens", "bytes_per_second"}
"""Ends of names that say a unit; a name without one counts what it is called."""


def told(pacing="staggered", **changed):
    """Return a report as the worker makes it."""
    settings = RuntimeSettings(
        pacing=pacing,
        residency="auto",
        draft_length=8,
        max_verifies=2,
        staging_slots=64,
        token_bytes=4,
        horizon=32,
    )
    runtime = Runtime(settings)
    zeros = dict.fromkeys(LIVE, 0)
    return {**Counters().report(), **runtime.report(), **zeros, **changed}


def record(*rows, at=0.0):
    """Return an iteration of (phase, tokens, emitted) rows that ended at ``at``."""
    return IterationRecord(
        index=1,
        began=at,
        ended=at,
        rows=tuple(RowRecord(f"r{i}", *row) for i, row in enumerate(rows)),
        moves=(),
        transfers=(),
        reservations={},
    )


class Published:
    """Metrics of their own registry over a report the test writes."""

    def __init__(self, **changed):
        self.report = told(**changed)
        self.reads = 0
        self.registry = prometheus_client.CollectorRegistry()
        self.metrics = Metrics(LABELS, self._read, self.registry)

    def _read(self):
        self.reads += 1
        return dict(self.report)

    def value(self, name, **labels):
        return self.registry.get_sample_value(name, {**LABELS, **labels})


# -- the table --------------------------------------------------------------------


def test_every_key_is_one_the_worker_reports():
    keys = [key for metric in TABLE for key in metric.keys]
    assert len(keys) == len(set(keys)), "a key feeds one sample"
    assert set(keys) <= told().keys()
    assert set(keys) >= LIVE
    reported = {**Counters().report(), **told("lockstep")}
    assert {k for m in TABLE if not m.rings for k in m.keys} <= reported.keys()


@pytest.mark.parametrize("metric", TABLE, ids=lambda metric: metric.name)
def test_a_metric_is_named_as_prometheus_wants_it(metric):
    assert re.fullmatch(r"vericache_[a-z_]+", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert (metric.kind == "histogram") == (not metric.sources)
    assert bool(metric.label) == (len(metric.sources) > 1)
    assert metric.help.endswith(".")
    assert metric.unit
    base = metric.name.removesuffix("_total")
    for unit in UNITS:
        said = base.endswith(f"_{unit}") and not base.endswith(f"per_{unit}")
        assert not said or unit.split("_")[-1] in metric.unit, metric.name
    assert not metric.unit.startswith(("bytes", "seconds", "ratio")) or any(
        base.endswith(f"_{unit}") for unit in UNITS
    )


def test_names_are_told_apart():
    names = [metric.name for metric in TABLE]
    assert len(names) == len(set(names))


def test_the_printed_table_has_a_line_for_each():
    lines = markdown().splitlines()
    assert len(lines) == len(TABLE) + 2
    assert {line.count("|") for line in lines} == {6}
    for metric, line in zip(TABLE, lines[2:], strict=True):
        assert f"`{metric.name}`" in line
        assert metric.help in line


# -- what is published --------------------------------------------------------------


@pytest.mark.parametrize("pacing", ["staggered", "lockstep", "sequential"])
def test_all_metrics_are_there_from_the_start(pacing):
    published = Published(pacing=pacing)
    families = {family.name: family for family in published.registry.collect()}
    wanted = [m for m in TABLE if pacing == "staggered" or not m.rings]
    assert len(families) == len(wanted)
    for metric in wanted:
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.kind
        assert metric.unit in family.documentation
        # Samples exist at 0, so that a rate sees the first step.
        for value, key in metric.sources:
            own = {metric.label: value} if metric.label else {}
            assert published.value(metric.name, **own) == published.report[key]


@pytest.mark.parametrize("key", ["drafted", "shadow_mismatches", "slips"])
def test_a_report_without_a_key_is_refused(key):
    report = told()
    del report[key]
    registry = prometheus_client.CollectorRegistry()
    with pytest.raises(InvariantError, match=key):
        Metrics(LABELS, lambda: report, registry)
    assert list(registry.collect()) == []


def test_counters_grow_by_the_difference_and_gauges_are_set():
    published = Published(drafted=5, host_used_bytes=100)
    published.report.update(drafted=12, host_used_bytes=40)
    published.metrics.idle()
    published.metrics.idle()
    assert published.value("vericache_drafted_tokens_total") == 12
    assert published.value("vericache_host_bytes") == 40


def test_the_report_is_read_at_most_once_a_second():
    published = Published()
    published.metrics.iteration(record(at=50.0))
    before = published.reads
    for step in range(1, 40):
        published.metrics.iteration(record(at=50.0 + step / 10))
    assert published.reads - before == 3
    published.report["rounds"] = 7
    published.metrics.iteration(record(at=53.95))
    assert published.value("vericache_verifications_total") == 0
    published.metrics.close()
    assert published.value("vericache_verifications_total") == 7


rows = st.lists(
    st.one_of(
        st.tuples(st.just("draft"), st.just(1), st.just(0)),
        st.tuples(st.just("plain"), st.just(1), st.just(1)),
        st.tuples(st.just("wait"), st.just(0), st.just(0)),
        st.integers(1, 257).flatmap(
            lambda width: st.tuples(
                st.just("verify"), st.just(width), st.integers(1, width)
            )
        ),
    ),
    max_size=8,
)


@given(iterations=st.lists(rows, max_size=6))
@settings(deadline=None, max_examples=50)
def test_histograms_hold_every_verification_and_nothing_else(iterations):
    published = Published()
    for each in iterations:
        published.metrics.iteration(record(*each))
    verified = [row for each in iterations for row in each if row[0] == "verify"]
    sums = {
        "verification_accepted_tokens": sum(row[2] - 1 for row in verified),
        "verification_width_tokens": sum(row[1] for row in verified),
        "burst_tokens": sum(row[2] for row in verified),
    }
    for name, total in sums.items():
        assert published.value(f"vericache_{name}_count") == len(verified)
        assert published.value(f"vericache_{name}_sum") == total
    at_most_8 = sum(row[2] - 1 <= 8 for row in verified)
    bucket = "vericache_verification_accepted_tokens_bucket"
    assert published.value(bucket, le="8.0") == at_most_8


CHILD = """
import os, sys
sys.path[:0] = sys.argv[2:]
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
import vericache_sglang.telemetry.metrics as module
assert "prometheus_client" not in sys.modules
from test_metrics_told import report
metrics = module.Metrics({"model_name": "demo"}, lambda: report)
report["drafted"] += 9
report["host_used_bytes"] = 3
metrics.close()
"""


def test_another_process_serves_what_this_one_counted(tmp_path):
    """SGLang's way: the scheduler writes files, the HTTP process collects them."""
    folder = tmp_path / "prometheus"
    folder.mkdir()
    module = tmp_path / "test_metrics_told.py"
    module.write_text(f"report = {told(drafted=1)!r}")
    for _ in range(2):  # gauges of one process, not a sum over two
        subprocess.run(
            [sys.executable, "-c", CHILD, str(folder), str(tmp_path), str(ROOT)],
            check=True,
        )
    reader = (
        "import prometheus_client as p, prometheus_client.multiprocess as m\n"
        "r = p.CollectorRegistry()\nm.MultiProcessCollector(r)\n"
        "print(p.generate_latest(r).decode())"
    )
    text = subprocess.run(
        [sys.executable, "-c", reader],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for metric in TABLE:
        assert f"# HELP {metric.name} " in text
        assert f"# TYPE {metric.name} {metric.kind}" in text
    assert 'vericache_host_bytes{model_name="demo"} 3.0' in text
    assert 'vericache_drafted_tokens_total{model_name="demo"} 20.0' in text
