"""Nothing is kept per request: after thousands all tables are as long as before."""

import dataclasses
from collections import deque

import pytest
import torch

pytest.importorskip("sglang")

from segment_world import (
    SegmentWorld,
    attach_store,
    fetched,
    shorten_segments,
)
from storages import MemoryStorage
from tiny_engine import opened

from vericache_sglang.planning.hardware import GB
from vericache_sglang.scheduling.plan import Compress, Residency
from vericache_sglang.simulation.costs import Costs
from vericache_sglang.simulation.policies import policies
from vericache_sglang.simulation.server import SimulatedServer
from vericache_sglang.simulation.setup import Setup
from vericache_sglang.simulation.workload import RequestMix, closed_loop

pytestmark = pytest.mark.sglang

TABLES = (dict, set, list, deque)


def tables(found, path="", seen=None):
    """Return the length of every table of our objects, by where it is.

    Rings of a fixed length are left out: ``deque(maxlen=...)``.
    """
    seen = {} if seen is None else seen
    if id(found) in seen or isinstance(found, (torch.Tensor, str, bytes, type)):
        return {}
    seen[id(found)] = found  # kept alive, so that no other object gets its id
    sizes = {}
    if isinstance(found, TABLES):
        if getattr(found, "maxlen", None) is None:
            sizes[path] = len(found)
        values = found.values() if isinstance(found, dict) else found
        for each in list(values):
            if not isinstance(each, (int, float, str)):
                inner = tables(each, f"{path}[]", seen)
                sizes |= {name: sizes.get(name, 0) + n for name, n in inner.items()}
        return sizes
    if not type(found).__module__.startswith("vericache"):
        return {}
    names = {*getattr(found, "__dict__", ())}
    if dataclasses.is_dataclass(found):
        names |= {field.name for field in dataclasses.fields(found)}
    for name in sorted(names):
        sizes |= tables(getattr(found, name, None), f"{path}.{name}", seen)
    return sizes


def test_the_walk_sees_what_grows():
    with opened() as engine:
        before = tables(engine.placement)
        engine.placement._outgoing.append("a")
        grown = tables(engine.placement)
    assert grown == {**before, "._outgoing": 1}


@pytest.mark.parametrize(
    "to",
    [Residency.HOST, pytest.param(Residency.DEVICE, marks=pytest.mark.extended)],
)
def test_requests_of_an_engine_leave_nothing_behind(to):
    with opened(cached=True) as engine:
        lengths = []
        for i in range(800):
            rid = f"r{i}"
            state = engine.admit(rid, f"x{i % 3}", 30, insertable=i % 4 > 0)
            assert state is not None
            if i % 4 == 0:
                assert engine.move(Compress(rid, to), rid)
            engine.abort(rid) if i % 3 else engine.finish(rid)
            engine.placement.poll_outgoing()  # as every plan does
            if i in (200, 799):
                engine.evict()
                lengths.append(tables(engine.placement))
        assert lengths[0] == lengths[1]


def test_3000_requests_of_the_scheduler_leave_nothing_behind():
    costs = Costs(
        memory_bytes=3 * GB,
        weight_bytes=GB,
        token_bytes=1000,
        hbm_bytes_per_s=1e11,
        flops_per_s=1e15,
        flops_per_token=1e9,
        flops_per_product=1e4,
        overhead_s=1e-3,
        link_bytes_per_s=1e9,
        link_latency_s=0.0,
    )
    mix = RequestMix(contexts=(100, 300), output=7, accept=0.8, spread=0.2, share=2)
    setup = Setup(costs=costs, workload=closed_loop(mix, 3_000, concurrency=16))
    server = SimulatedServer(setup, policies(0.25)["staggered"])
    server.run()
    assert server.counters.finished == 3_000
    left = tables(server.runtime)
    assert ".tracks" in left
    # The rings have a place for each window, whatever is reserved.
    grown = {path: n for path, n in left.items() if n > 1000}
    assert grown == {}, f"{len(server.runtime.tracks)} requests running"


def test_3000_segments_leave_nothing_behind(monkeypatch):
    """They are computed, cached, asked for in the store, given up and forgotten."""
    shorten_segments(monkeypatch)
    world = SegmentWorld()
    store = attach_store(world.segments, MemoryStorage())
    segments, lengths = world.segments, []
    for i in range(3_000):
        name = f"s{i}"
        slots = world.write_text([name])
        segments.register([name], slots)
        if i % 20 == 0:
            segments.stored.fetch(f"r{i}", [f"none{i}"], 0)
            store.arrive()
            assert fetched(segments, f"r{i}")
            segments.stored.pop(f"r{i}")
        if i % 7 == 0:
            segments.distrust([name])
        segments.leaving(slots)
        world.give(slots)
        segments.forget(name)
        if i in (500, 2999):
            lengths.append(tables(segments))
    assert lengths[0] == lengths[1]
