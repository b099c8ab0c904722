"""The table of metrics, and what is published from it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.compression.guard import CompressorGuard
from vericache_sglang.errors import InvariantError
from vericache_sglang.observability.counters import Counters, Totals
from vericache_sglang.observability.prometheus import Metrics
from vericache_sglang.observability.record import IterationRecord, RowRecord
from vericache_sglang.observability.table import (
    COUNTER_KEYS,
    METRICS,
    PUBLISHED,
    SECTIONS,
    TABLE,
    page,
)
from vericache_sglang.prefix_cache.counters import TierCounters
from vericache_sglang.prefix_cache.store.counters import StoreCounters
from vericache_sglang.scheduling.runtime import Runtime
from vericache_sglang.scheduling.settings import RuntimeSettings

prometheus_client = pytest.importorskip("prometheus_client")

ROOT = Path(__file__).parents[2]
LABELS = {"model_name": "demo", "tp_rank": "0"}

LIVE = {
    *("kept_slots", "staging_slots", "staging_bytes", "staging_tokens"),
    *("host_bytes", "host_pinned_bytes", "host_used_bytes", "host_budget_bytes"),
    *("graph_forwards", "eager_forwards", "running", "query_tails"),
    "kv_read_bytes_per_s",
    *(
        "consistency_checks",
        "consistency_mismatches",
        "consistency_dropped",
        "consistency_pending",
    ),
    *("cache_device_tokens", "cache_host_tokens", "cache_host_bytes"),
    *("cache_store_tokens", "cache_store_bytes", "cache_segments", "answer_epoch"),
    *("remote_malformed", "remote_verifiers", "remote_guests"),
    *("remote_share_b1", "remote_share_p1", "remote_share_local"),
    *("remote_reserved_link", "remote_reserved_pool"),
    *("cache_residual_bytes", "cache_draft_slots", "cache_draft_slots_used"),
    *CompressorGuard("", 1).report(),
    *TierCounters().report(),
    *StoreCounters().report(),
}
"""Keys only a live server reports; end_to_end/test_metrics.py compares with one."""

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
    return {**Counters().report(), **runtime.figures(), **zeros, **changed}


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
        self.metrics = Metrics(LABELS, self._read, registry=self.registry)

    def _read(self):
        self.reads += 1
        return dict(self.report)

    def value(self, name, **labels):
        return self.registry.get_sample_value(name, {**LABELS, **labels})


def test_discarded_verifications_are_in_no_histogram():
    published = Published()
    published.metrics.iteration(record(("verify", 9, 4), ("verify", 9, 6, True)))
    name = "vericache_verification_accepted_tokens"
    assert published.value(f"{name}_count") == 1
    assert published.value(f"{name}_sum") == 3


# -- the table --------------------------------------------------------------------


def test_the_table_has_every_figure_of_the_report_and_no_other():
    keys = [key for row in TABLE for key in row.samples.values()]
    assert len(keys) == len(set(keys)), "a key is one figure"
    texts = {key for row in TABLE for key in row.told.values()}
    assert not texts & {*keys}
    assert {*keys, *texts} == told().keys()
    without = {key for row in TABLE if not row.rings for key in row.samples.values()}
    assert without | texts == told("lockstep").keys()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.metric}{row.key}")
def test_a_row_is_complete(row):
    assert bool(row.label) == bool(row.keys)
    assert len(row.keys) != 1
    assert not (row.key and row.keys)
    assert (row.kind == "histogram") == (not row.samples)
    assert row.help.endswith(".")
    assert row.unit
    assert row.metric or row.kind == "gauge"


@pytest.mark.parametrize("row", METRICS, ids=lambda row: row.name)
def test_a_metric_is_named_as_prometheus_wants_it(row):
    assert re.fullmatch(r"vericache_[a-z_]+", row.name)
    assert (row.kind == "counter") == row.name.endswith("_total")
    base = row.name.removesuffix("_total")
    for unit in UNITS:
        said = base.endswith(f"_{unit}") and not base.endswith(f"per_{unit}")
        assert not said or unit.split("_")[-1] in row.unit, row.name
    assert not row.unit.startswith(("bytes", "seconds", "ratio")) or any(
        base.endswith(f"_{unit}") for unit in UNITS
    )


def test_names_are_told_apart():
    names = [row.name for row in METRICS]
    assert len(names) == len(set(names))


def test_the_monitoring_page_is_what_the_module_prints():
    printed = subprocess.run(
        [sys.executable, "-m", "vericache_sglang.observability"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed == page()
    assert (ROOT / "docs" / "monitoring.md").read_text() == printed, (
        "python -m vericache_sglang.observability > docs/monitoring.md"
    )
    figures, _, _ = printed.partition("## Former names")
    lines = [line for line in figures.splitlines() if line.startswith("|")]
    assert len(lines) == len(TABLE) + 2 * len(SECTIONS)
    assert {line.count("|") for line in lines} == {6}


# -- the engine's counters -----------------------------------------------------------


def test_the_engine_counts_what_the_table_has():
    counters = Counters()
    counters.note_forward([])
    counters.note_cycle(7, 5)
    counters.staged_bytes += 10
    report = counters.report()
    assert report["drafted"] == 7
    assert report["mean_accepted"] == 5
    assert report["staged_bytes"] == 10
    with pytest.raises(AttributeError):
        counters.unknown = 1
    with pytest.raises(AttributeError):
        counters.misspelled += 1


def test_a_total_does_not_fall_when_its_source_starts_again():
    totals = Totals()
    seen = [
        totals.over({"cache_store_hits": hits, "running": running})
        for hits, running in [(0, 3), (5, 0), (5, 1), (0, 1), (2, 0), (1, 0)]
    ]
    assert [each["cache_store_hits"] for each in seen] == [0, 5, 5, 5, 7, 8]
    assert [each["running"] for each in seen] == [3, 0, 1, 1, 0, 0], "gauges may fall"


@given(
    st.lists(
        st.dictionaries(st.sampled_from(COUNTER_KEYS[:3]), st.integers(0, 9)),
        max_size=9,
    )
)
def test_totals_can_be_published_whatever_is_read(reports):
    told_now = told()
    totals = Totals()
    registry = prometheus_client.CollectorRegistry()
    metrics = Metrics(LABELS, lambda: totals.over(told_now), registry=registry)
    for report in reports:
        told_now.update(report)
        metrics.idle()


# -- what is published --------------------------------------------------------------


@pytest.mark.parametrize("pacing", ["staggered", "lockstep", "sequential"])
def test_all_metrics_are_there_from_the_start(pacing):
    published = Published(pacing=pacing)
    families = {family.name: family for family in published.registry.collect()}
    wanted = [row for row in PUBLISHED if pacing == "staggered" or not row.rings]
    assert len(families) == len(wanted)
    for row in wanted:
        family = families[row.name.removesuffix("_total")]
        assert family.type == row.kind
        assert row.unit in family.documentation
        # Samples exist at 0, so that a rate sees the first step.
        for value, key in row.samples.items():
            own = {name: str(published.report[each]) for name, each in row.told.items()}
            own |= {row.label: value} if row.label else {}
            assert published.value(row.name, **own) == published.report[key]


@pytest.mark.parametrize("key", ["drafted", "consistency_checks", "deadline_misses"])
def test_a_report_without_a_key_is_refused(key):
    report = told()
    del report[key]
    registry = prometheus_client.CollectorRegistry()
    with pytest.raises(InvariantError, match=key):
        Metrics(LABELS, lambda: report, registry=registry)
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
    published.report["cycles"] = 7
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
import vericache_sglang.observability.prometheus as module
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
    for row in METRICS:
        assert f"# HELP {row.name} " in text
        assert f"# TYPE {row.name} {row.kind}" in text
    assert 'vericache_host_bytes{model_name="demo"} 3.0' in text
    assert 'vericache_drafted_tokens_total{model_name="demo"} 20.0' in text
