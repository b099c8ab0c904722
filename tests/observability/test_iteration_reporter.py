"""Iterations reach every sink once they are known, and no fault reaches the worker."""

from collections import namedtuple
from types import SimpleNamespace

import pytest

from vericache_sglang.observability.guard import MOST_FAILURES, Guard
from vericache_sglang.observability.iteration_reporter import IterationReporter
from vericache_sglang.observability.link_log import LinkLog
from vericache_sglang.observability.record import RowRecord, VerdictRecord
from vericache_sglang.scheduling.link import LinkEstimate
from vericache_sglang.scheduling.plan import Deliver, Draft, Offload, Verify, Wait
from vericache_sglang.scheduling.runtime import Runtime
from vericache_sglang.scheduling.settings import RuntimeSettings

Request = namedtuple("Request", "rid drafted drafted_max prompt emitted")

REQUESTS = {
    0: Request("a", 3, 5, 100, 7),
    2: Request("b", 5, 6, 200, 0),
    3: Request("c", 0, 0, 300, 1),
}
ACTIONS = {0: Draft("a", 2), 2: Verify("b", 1), 3: Wait("c")}


class Sink:
    """Remembers what it is told; raises where it is broken."""

    def __init__(self, broken=False):
        self.records, self.idles, self.closed, self.broken = [], 0, 0, broken

    def iteration(self, record):
        if self.broken:
            raise ValueError("broken sink")
        self.records.append(record)

    def idle(self):
        self.idles += 1

    def close(self):
        self.closed += 1


def reporter(**sinks):
    settings = RuntimeSettings(
        pacing="staggered",
        residency="auto",
        draft_length=8,
        max_verifies=2,
        staging_slots=64,
        token_bytes=4,
        horizon=32,
    )
    log = LinkLog(LinkEstimate(1e9))
    made = IterationReporter(Runtime(settings), log, sinks, Guard())
    log.note("b", "in", SimpleNamespace(nbytes=10, seconds=0.5))
    return made


def iterate(made, counts=(0, 9, 6, 9)):
    made.begin(REQUESTS, ACTIONS)
    made.end([Offload("a")])
    made.recorded(lambda: list(counts), frozenset({3}))


def test_verdicts_that_were_asked_for_are_recorded():
    sink = Sink()
    made = reporter(sink=sink)
    actions = {**ACTIONS, 0: Deliver("a", (1, 2), 4, 0.5), 3: Deliver("c", (3,))}
    made.begin(REQUESTS, actions)
    made.end([])
    made.recorded(lambda: [2, 9, 6, 1], frozenset())
    (record,) = sink.records
    assert record.verdicts == (VerdictRecord("a", 4, 2, 0.5),)
    assert record.rows[0] == RowRecord("a", "wait", 0, 2)


def test_an_iteration_is_sent_when_its_end_and_its_results_are_known():
    sink = Sink()
    made = reporter(sink=sink)
    made.begin(REQUESTS, ACTIONS)
    made.end([Offload("a")])
    made.begin(REQUESTS, None)  # the next one is launched first, under overlap
    assert sink.records == []
    made.recorded(lambda: [0, 9, 6, 9], frozenset({3}))
    (record,) = sink.records
    assert record.index == 1
    assert [
        (row.rid, row.phase, row.tokens, row.emitted, row.discarded)
        for row in record.rows
    ] == [
        ("a", "draft", 3, 0, False),
        ("b", "verify", 8, 6, False),
        ("c", "wait", 0, 9, True),
    ]
    assert record.moves == (Offload("a"),)
    assert [copy.nbytes for copy in record.transfers] == [10]
    assert record.reservations.keys() == {"link", "staging", "verify"}
    made.recorded(lambda: [1, 1, 1, 1], frozenset())
    assert len(sink.records) == 1, "it has not ended"
    made.end(())
    assert [row.phase for row in sink.records[1].rows] == ["plain"] * 3


def test_nothing_is_asked_where_there_is_no_sink():
    made = reporter()
    made.begin(REQUESTS, ACTIONS)
    made.end(())
    made.recorded(lambda: pytest.fail("asked for"), frozenset())
    made.idle()
    made.close()


def test_lanes_and_rings_are_reported():
    made = reporter()
    made.begin({0: REQUESTS[0]}, {0: ACTIONS[0]})
    found = made.report({request.rid: request for request in REQUESTS.values()})
    assert [lane["phase"] for lane in found["lanes"]] == ["draft", "wait", "wait"]
    assert found["lanes"][0] == {
        **{"rid": "a", "phase": "draft", "drafts": 3, "most": 0, "prompt": 100},
        **{"emitted": 7, "residency": "device", "acceptance": 0.0},
    }
    assert found["rings"].keys() == {"link", "staging", "verify"}


def test_a_broken_sink_disturbs_neither_the_worker_nor_the_other_sinks(caplog):
    broken, whole = Sink(broken=True), Sink()
    made = reporter(broken=broken, whole=whole)
    for _ in range(10):
        iterate(made)
    made.idle()
    made.close()
    assert len(whole.records) == 10
    assert (whole.idles, whole.closed) == (1, 1)
    assert broken.idles == 0, "switched off"
    assert sum(bool(record.exc_info) for record in caplog.records) == 1
    assert "broken sink" in caplog.text


def test_a_fault_of_the_reporter_itself_switches_it_off(caplog):
    sink = Sink()
    made = reporter(sink=sink)
    for _ in range(MOST_FAILURES):
        made.begin(REQUESTS, {0: object()})  # no such action
    for _ in range(3):
        iterate(made)
    assert sink.records == []
    assert "iteration reporter is switched off" in caplog.text
