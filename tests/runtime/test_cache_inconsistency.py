"""What is cached and does not add up costs cached prefixes, no token and no server."""

import pytest

pytest.importorskip("sglang")

import torch
from segment_world import SHORT, shorten_segments
from tiny_segments import tiered

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.host_store import HostStore
from vericache_sglang.kv.ledger import Ledger
from vericache_sglang.prefix_cache.index import SegmentIndex
from vericache_sglang.scheduling.plan import Compress, Residency

pytestmark = pytest.mark.sglang

TOKENS = 4 * SHORT


@pytest.fixture(autouse=True, scope="module")
def short_segments():
    with pytest.MonkeyPatch.context() as patch:
        shorten_segments(patch, ("compress", "tiered_cache"))
        yield


def corrupt_parent(engine):
    """Have the index believe that a segment follows one that is not there."""
    index = engine.segments._index
    name = next(iter(index._segments))
    index._children.setdefault("nobody", {})[name] = None


def corrupt_totals(engine):
    for total in engine.segments._index._totals.values():
        total[1] += 4


def raising(owner, name):
    """Have a call raise from now on."""

    def corrupt(engine):
        def fail(*given, **named):
            raise InvariantError(f"{name} does not add up")

        engine.monkeypatch.setattr(owner, name, fail)

    return corrupt


FAULTS = {
    "a link of the index": corrupt_parent,
    "a total of the index": corrupt_totals,
    "the index in every look-up": raising(SegmentIndex, "get"),
    "the index as a segment is added": raising(SegmentIndex, "add"),
    "the index as it is recounted": raising(SegmentIndex, "check"),
    "the ledger": raising(Ledger, "check"),
    "the host store": raising(HostStore, "check"),
}


@pytest.fixture
def engine(monkeypatch):
    """Return an engine in which a prompt is cached on the host, as served."""
    with tiered() as engine:
        engine.monkeypatch = monkeypatch
        engine.segments.strict = False
        engine.admit("first", "x", TOKENS)
        engine.finish("first")
        engine.evict()
        assert engine.segments.report()["cache_host_tokens"] >= TOKENS - SHORT
        yield engine


@pytest.mark.parametrize("name", FAULTS)
def test_the_cache_is_dropped_and_requests_go_on(engine, name, caplog):
    FAULTS[name](engine)
    for i in range(4):
        # Every bit is compared where it is admitted, verified and finished.
        assert engine.admit(f"r{i}", "xz"[i % 2], TOKENS) is not None
        if i == 2:
            engine.move(Compress(f"r{i}", Residency.DEVICE), f"r{i}")
            engine.verify(f"r{i}", 1)
        engine.placement.check(engine.requests)
        engine.finish(f"r{i}")
        engine.evict()
    assert engine.segments.counters.inconsistencies > 0
    assert not engine.segments.active
    assert "cached prefixes are dropped" in caplog.text
    engine.monkeypatch.undo()
    engine.tree.reset()
    engine.allocator.clear()
    assert engine.segments.active, "after a flush they are cached again"
    seen = engine.segments.counters.inconsistencies
    engine.admit("last", "x", TOKENS)
    engine.placement.check(engine.requests)
    engine.finish("last")
    assert engine.segments.counters.inconsistencies == seen


def test_tests_see_what_does_not_add_up(engine):
    engine.segments.strict = True
    corrupt_totals(engine)
    with pytest.raises(InvariantError, match="totals are"):
        engine.placement.check(engine.requests)
    assert engine.segments.active


def test_a_lost_device_is_no_matter_of_the_cache(engine):
    def lost(*given):
        raise torch.AcceleratorError("the device is gone")

    engine.monkeypatch.setattr(SegmentIndex, "check", lost)
    with pytest.raises(torch.AcceleratorError):
        engine.placement.check(engine.requests)
