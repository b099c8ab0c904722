"""What the host does on its stream while a forward on another one still stores.

SGLang's overlap schedule launches a forward before it knows that a request of it has
ended. That one's slots go to others at once: to a row that is made whole for the prefix
tree, to a prefix that comes back from the host, to a prompt. Whatever is written there
has to come behind the forward's store. The streams run in any order that their events
allow, the forwards last of all; memory is so tight that slots are used again at once.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulated_cuda import simulated, until

pytest.importorskip("sglang")

from segment_world import shorten_segments
from test_compress_segments import ABOVE, History
from test_device_moves import WIDE_PLANES
from tiny_engine import opened
from tiny_segments import tiered

from vericache_sglang.scheduling.plan import Compress, Residency

pytestmark = pytest.mark.sglang

NAMES = "abcde"
NUMBERS = st.integers(0, 4), st.integers(0, 4)
ON_HOST = st.tuples(st.sampled_from(["end", "end", "admit", "evict"]), *NUMBERS)
IN_WORKER = st.tuples(st.sampled_from(["move", "move", "decode"]), *NUMBERS)
ITERATION = st.tuples(
    st.lists(ON_HOST, max_size=4), st.lists(IN_WORKER, min_size=1, max_size=4)
)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch, ABOVE)


def iterate(engine, history, steps):
    """Run one iteration: what the host does, then what the worker does."""
    on_host, in_worker = steps
    engine.fly()
    for act, who, number in on_host:
        known = NAMES[who] in engine.requests
        if act == "evict":
            engine.evict()
        elif known is (act == "end"):
            history.step("end", who, number, check=False)
    for act, who, number in in_worker:
        if NAMES[who] in engine.requests:
            history.step(act, who, number, check=False)


def left_cached(engine, cuda):
    """End all; once the device is idle, the tree has every text's own KV."""
    for rid in list(engine.requests):
        engine.finish(rid)
    cuda.drain()
    engine.checks.all()
    for text in ("x", "y", "x/16/y", "x/8/z", "w"):
        cached, _ = engine.match(text, engine.ids(text, 48))
        kv, _ = engine.kv.truth(text)
        assert torch.equal(engine.kv.at(cached), kv[:, :, : len(cached)]), text


@pytest.mark.extended
@settings(phases=[Phase.generate])
@given(
    seed=st.integers(0, 10**6),
    slots=st.integers(56, 100),
    shares=st.booleans(),
    steps=st.lists(ITERATION, min_size=4, max_size=12),
)
def test_what_is_written_beside_a_forward_comes_behind_its_stores(
    seed, slots, shares, steps
):
    with simulated(seed) as cuda:
        cuda.runs = True
        options = {"cuda": cuda, "slots": slots, "dtype": torch.bfloat16}
        options["shares"] = shares
        with tiered(host_segments=30, **options) as engine:
            cuda.asynchronous = engine.streams.forward_stream
            history = History(engine)
            for each in steps:
                iterate(engine, history, each)
            left_cached(engine, cuda)


def saved(engine):
    engine.placement.poll_outgoing()
    return not engine.placement._outgoing


@pytest.mark.parametrize("codec", ["", WIDE_PLANES])
def test_a_row_made_whole_in_slots_of_a_request_that_still_stores(codec):
    with simulated() as cuda:
        cuda.runs = True
        options = {"cuda": cuda, "codec": codec, "dtype": torch.bfloat16, "keep": 0.8}
        with opened(slots=112, **options) as engine:
            cuda.asynchronous = engine.streams.forward_stream
            for rid, text in ("a", "x"), ("b", "y"):
                engine.admit(rid, text, 40)
                assert engine.move(Compress(rid, Residency.HOST), rid)
            engine.evict()  # what the tree has of a row is not made again
            until(lambda: saved(engine))  # or their threads hurry the forward on
            engine.fly()
            engine.abort("a")
            engine.finish("b")
            assert engine.placement.counters.restores == 1
            left_cached(engine, cuda)
