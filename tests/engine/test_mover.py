"""Splits, moves and joins over a tiny pool: every bit in place, every slot accounted.

The pool's entries are random bits, so rows are compared with what they were written.
"""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

from tiny_engine import TinyEngine

from vericache_sglang.engine.state import Layout
from vericache_sglang.scheduling.plan import (
    Offload,
    Park,
    Pin,
    Residency,
    Resume,
    Split,
    Unsplit,
)

pytestmark = pytest.mark.sglang

PLANES = "split-planes:exponent_bits=4,mantissa_bits=3,block=4"
TURBO = "turboquant:bits=3"
BOTH = (Layout.BESIDE, Layout.PERMUTED)
KINDS = [("", True), (PLANES, False), (PLANES, True), (TURBO, True)]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Segments of 16 tokens, so that a tiny prompt has several."""
    monkeypatch.setattr("vericache_sglang.memory.segments.SEGMENT", 16)
    monkeypatch.setattr("vericache_sglang.engine.codes.SEGMENT", 16)


@contextmanager
def opened(**options):
    engine = TinyEngine(**options)
    try:
        yield engine
    finally:
        engine.close()


def moves_of(state):
    """What a plan may ask of a request, by how its row lists it."""
    rid = state.rid
    to_host, to_device = (Split(rid, place) for place in (Residency.HOST, Residency.DEVICE))
    return {
        Layout.WHOLE: [to_host, to_device],
        Layout.BESIDE: [Offload(rid), Unsplit(rid)],
        Layout.PERMUTED: [Offload(rid), Unsplit(rid)],
        Layout.KEPT: [Pin(rid), Park(rid)],
        Layout.PARKED: [Resume(rid)],
    }[state.layout]


class History:
    """Requests that come, move, decode and go, as a list of steps says."""

    def __init__(self, engine):
        self.engine = engine

    def step(self, act, who, number):
        rid, engine = "abc"[who], self.engine
        request = engine.requests.get(rid)
        if request is None:
            engine.admit(rid, "xxy"[who], 20 + number * 3, insertable=number != 2)
        elif act == "end":
            (engine.abort if number == 5 else engine.finish)(rid)
        elif act == "move":
            moves = moves_of(request.state)
            engine.move(moves[number % len(moves)], rid)
        else:
            self.decode(request.state, number)
        engine.check()

    def decode(self, state, number):
        rid = state.rid
        if state.layout is Layout.PARKED:
            return
        shadowed = state.layout is Layout.KEPT or (
            state.parts is not None and state.parts.shadow >= 0
        )
        if not shadowed:
            self.engine.plain(rid)
        elif len(state.drafts) < 4 and number:
            self.engine.draft(rid)
        else:
            self.engine.verify(rid, number)


STEP = st.tuples(
    st.sampled_from(["move", "move", "move", "decode", "decode", "decode", "end"]),
    st.integers(0, 2),
    st.integers(0, 5),
)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("codec", "selects"), KINDS)
def test_any_history_keeps_every_bit_and_every_slot(codec, selects, cached, page):
    @settings(deadline=None, max_examples=10)
    @given(st.lists(STEP, min_size=10, max_size=30))
    def histories(steps):
        options = {"codec": codec, "selects": selects, "cached": cached}
        dtype = torch.bfloat16 if codec == PLANES else torch.float32
        with opened(page=page, dtype=dtype, slots=120, **options) as engine:
            history = History(engine)
            for step in steps:
                history.step(*step)
            for rid in list(engine.requests):
                engine.finish(rid)
            engine.check()
            assert engine.residence.host.used_bytes == 0
            assert len(engine.residence.watch) == 0

    histories()
