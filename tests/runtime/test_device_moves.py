"""Splits, moves and joins over a CUDA device whose streams run in any order.

What is simulated is the device alone: the pool's tensors, streams, events, kernels.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulated_cuda import simulated, until

pytest.importorskip("sglang")

from test_moves import KINDS, PLANES, STEP, History
from tiny_engine import opened, wait_for

from vericache_sglang.errors import LostKVError
from vericache_sglang.kv.host_image import HostImage
from vericache_sglang.kv.plane_residual import PlaneResidual
from vericache_sglang.scheduling.plan import (
    Compress,
    Load,
    Offload,
    Residency,
    SwapIn,
    SwapOut,
)

pytestmark = pytest.mark.sglang

WIDE_PLANES = PLANES.replace("block=4", "block=16")
"""Blocks of the least tokens a kernel joins."""


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    """Segments of 16 tokens, so that a tiny prompt has several."""
    monkeypatch.setattr("vericache_sglang.kv.segment_length.SEGMENT", 16)
    monkeypatch.setattr("vericache_sglang.kv.packed_drafts.SEGMENT", 16)


def cached_texts(engine):
    """Check what the tree has of every text, once nothing runs."""
    for text in "xy":
        ids = engine.ids(text, 48)
        cached, _ = engine.match(text, ids)
        kv, _ = engine.kv.truth(text)
        assert torch.equal(engine.kv.at(cached), kv[:, :, : len(cached)]), text


@pytest.mark.parametrize(
    ("codec", "selects", "page"),
    [
        (PLANES, True, 4),
        pytest.param(PLANES, True, 1, marks=pytest.mark.extended),
        *(
            pytest.param(*kind, 4, marks=pytest.mark.extended)
            for kind in KINDS
            if kind != (PLANES, True)
        ),
    ],
)
def test_any_history_keeps_every_bit_and_every_slot(codec, selects, page):
    codec = WIDE_PLANES if codec == PLANES else codec

    # A shorter example is not worth the minutes it takes to find; codes are slow.
    @settings(max_examples=3 if codec else 6, phases=[Phase.generate])
    @given(
        seed=st.integers(0, 10**6),
        steps=st.lists(st.tuples(STEP, st.booleans()), min_size=10, max_size=30),
    )
    def histories(seed, steps):
        with simulated(seed) as cuda:
            cuda.runs = True
            options = {"codec": codec, "selects": selects, "keep": 0.8, "page": page}
            options |= {"cuda": cuda, "dtype": torch.bfloat16}
            with opened(slots=112, **options) as engine:
                history = History(engine, shortest=29)
                for step, check in steps:
                    history.step(*step, check=check)
                for rid in list(engine.requests):
                    engine.finish(rid)
                engine.checks.all()
                cuda.drain()
                cached_texts(engine)
            assert engine.placement.host.used_bytes == 0

    histories()


def failing(patch, name, layer, error):
    """Have what an image does with a layer fail."""
    for kind in (HostImage, PlaneResidual):
        right = getattr(kind, name)

        def broken(self, at, *asked, right=right):
            if at == layer:
                raise error
            return right(self, at, *asked)

        patch.setattr(kind, name, broken)


@pytest.fixture(params=["host", "device"])
def machine(request):
    """What a tiny engine runs on, and how a copy to the host fails there at once."""
    if request.param == "host":
        yield {}, ("receive", RuntimeError("no copy"))
        return
    with simulated(7) as cuda:
        cuda.runs = True
        yield {"cuda": cuda}, ("outgoing", torch.OutOfMemoryError("no memory"))


@pytest.mark.parametrize("codec", ["", WIDE_PLANES])
@pytest.mark.parametrize("insertable", [True, False])
def test_a_copy_that_cannot_be_made_changes_nothing(machine, codec, insertable):
    where, (name, error) = machine
    options = {"codec": codec, "keep": 0.8, "dtype": torch.bfloat16, **where}

    def refused(move, layer):
        before = engine.checks.books()
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, name, layer, error)
            assert not engine.move(move, "a")
        assert engine.checks.books() == before
        engine.checks.all()

    with opened(**options) as engine:
        state = engine.admit("a", "x", 40, insertable=insertable)
        for layer in (0, 1):
            refused(Compress("a", Residency.HOST), layer)
        engine.plain("a")
        engine.checks.all()
        assert engine.move(Compress("a", Residency.DEVICE), "a")
        refused(Offload("a"), 1)
        engine.verify("a", 0)
        assert engine.move(Offload("a"), "a")
        refused(SwapOut("a"), 1)
        assert state.residency is Residency.HOST
        engine.verify("a", 0)
        engine.checks.all()
        engine.finish("a")
        engine.checks.all()


@pytest.mark.parametrize("codec", ["", WIDE_PLANES])
def test_a_copy_that_fails_behind_a_split_fails_its_prefetch(
    codec, monkeypatch, caplog
):
    """The row is the draft part's by then; the request prefills again."""
    with simulated(7) as cuda:
        cuda.runs = True
        options = {"codec": codec, "keep": 0.8, "dtype": torch.bfloat16}
        with opened(cuda=cuda, **options) as engine:
            state = engine.admit("a", "x", 40)
            failing(monkeypatch, "receive", 1, RuntimeError("no copy"))
            assert engine.move(Compress("a", Residency.HOST), "a")
            residual = engine.placement.host.residual("a")
            until(residual.filling.done)
            engine.placement.poll_outgoing()
            assert "copying layer 1 failed: no copy" in caplog.text
            assert not residual.sealed
            engine.placement.start_prefetch(state)
            assert wait_for(engine.placement.prefetches) == ([], ["a"])
            with pytest.raises(LostKVError):
                engine.move(Load("a"), "a")
            engine.evict()  # or the tree would have the prompt
            engine.finish("a")
            engine.checks.all()
            assert engine.placement.counters.restores == 0


@pytest.mark.parametrize(("codec", "selects"), KINDS)
def test_a_split_prompt_moves_without_a_wait_of_the_host(codec, selects):
    codec = WIDE_PLANES if codec == PLANES else codec
    options = {"codec": codec, "selects": selects, "keep": 0.8}
    with simulated(5) as cuda:
        cuda.runs = True
        with opened(cuda=cuda, dtype=torch.bfloat16, **options) as engine:
            state = engine.admit("a", "x", 40)
            assert engine.move(Compress("a", Residency.DEVICE), "a")
            assert (state.split.budget.coded > 0) is bool(codec)
            cuda.waits.clear()
            assert engine.move(Offload("a"), "a")
            engine.placement.start_prefetch(state)
            assert wait_for(engine.placement.prefetches) == (["a"], [])
            engine.placement.prefetches.end("a")
            assert engine.move(SwapOut("a"), "a")
            assert engine.move(SwapIn("a"), "a")
            assert engine.move(Load("a"), "a")
            assert engine.move(Offload("a"), "a")
            engine.placement.restore(state, engine.tree)
            assert cuda.waits == []
            assert state.residency is None
            engine.checks.all()
