"""The trace a live server writes, read while it runs, against its own counters."""

import json

import pytest

pytestmark = [pytest.mark.server, pytest.mark.extended]

LENGTH = 40
"""Tokens asked of each request."""


@pytest.fixture(scope="module")
def rids():
    return [f"traced-{i}" for i in range(3)]


@pytest.fixture(scope="module")
def counters(servers, prompts, rids):
    """Return the counters once the traced requests are done."""
    ours, _ = servers
    more = {"rid": rids}
    ours.generate(prompts[:3], max_new_tokens=LENGTH, ignore_eos=True, more=more)
    return ours.settle()


@pytest.fixture(scope="module")
def events(servers, counters):
    """Return the events so far; the server still writes, so the array is open."""
    ours, _ = servers
    text = (ours.log.parent / "trace").read_text()
    assert text.endswith(",\n"), "whole lines only"
    return json.loads(text.rstrip(",\n") + "]")


def slices(events, rid):
    return [e for e in events if e["ph"] == "X" and e["args"].get("rid") == rid]


def test_every_iteration_is_there(events, counters):
    indices = [e["args"]["index"] for e in events if e["name"] == "iteration"]
    assert indices == [*range(1, counters["iterations"] + 1)]


def test_requests_draft_and_verify_in_their_lanes(events, rids):
    for rid in rids:
        rows = [e for e in slices(events, rid) if "emitted" in e["args"]]
        assert {"draft", "verify"} <= {row["name"] for row in rows}
        assert len({row["tid"] for row in rows}) == 1
        # The prefill gave the first token.
        assert sum(row["args"]["emitted"] for row in rows) == LENGTH - 1
        drafts = sum(row["name"] == "draft" for row in rows)
        verified = sum(r["args"]["tokens"] - 1 for r in rows if r["name"] == "verify")
        assert drafts == verified


def test_splits_are_marked(events, rids):
    split = {e["args"]["rid"] for e in events if e["name"] == "compress"}
    assert set(rids) <= split


def test_every_prefetch_is_drawn(events, counters, rids):
    prefetches = [e for e in events if e["ph"] == "X" and e["name"] == "prefetch"]
    assert {e["args"]["rid"] for e in prefetches} >= set(rids)
    assert sum(e["args"]["bytes"] for e in prefetches) == counters["staged_bytes"]


def test_reservations_are_counted(events):
    rings = {e["name"] for e in events if e["ph"] == "C"}
    assert rings >= {"requests", "ring link", "ring staging", "ring verify"}
