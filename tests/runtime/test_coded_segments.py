"""Segments whose draft KV a codec packs, shared by prompts and kept in a store."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")

import segment_checks
import segment_world
import tiny_segments
from bound_codecs import DIM, HEADS, LAYERS, bound_codecs
from bound_codecs import LINES as ALL
from known_kv import KnownKV
from segment_world import IDENTITY, SHORT, attach_store, fetched, shorten_segments
from simulated_cuda import simulated, until
from storages import HeldStore
from test_compress_segments import ABOVE, STEP, History, left_behind, on_host, to
from tiny_segments import tiered

from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.handles import KVHandles
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.host_store import HostStore
from vericache_sglang.kv.packed_drafts import Codes
from vericache_sglang.kv.split_layers import as_bits, pick
from vericache_sglang.kv.thread_transfers import ThreadTransfers
from vericache_sglang.prefix_cache.segment import Form
from vericache_sglang.prefix_cache.segment_copies import SegmentCopies
from vericache_sglang.prefix_cache.segment_images import SegmentDraft
from vericache_sglang.prefix_cache.store.segment_store import StoreCodec
from vericache_sglang.scheduling.plan import Load, Offload, SwapIn, SwapOut

pytestmark = pytest.mark.sglang

LINES = {
    "planes": "split-planes:exponent_bits=4,mantissa_bits=3,block=4",
    "kivi": "kivi:bits=2,group=4,window=4",
}
WIDE = {
    "planes": "split-planes:exponent_bits=4,mantissa_bits=3,block=16",
    "kivi": "kivi:bits=2,group=16,window=16",
}
"""As kernels take them: groups of at least 16 tokens."""


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    shorten_segments(monkeypatch, ABOVE)


@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("line", LINES)
def test_any_history_keeps_every_bit_and_every_slot(line, page, selects):
    options = {"codec": LINES[line], "page": page, "selects": selects}

    @settings(deadline=None, max_examples=4)
    @given(
        st.sampled_from([8, 1000]),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.lists(STEP, min_size=10, max_size=30),
    )
    def histories(host_segments, dtype, steps):
        with tiered(
            host_segments=host_segments, dtype=dtype, slots=220, stores=True, **options
        ) as engine:
            history = History(engine)
            for step in steps:
                history.step(*step)
            left_behind(engine)

    histories()


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("line", LINES)
def test_shared_codes_become_a_requests_own_when_it_was_swapped_out(line, page):
    """Its codes keep the lengths of the segments, its residual KV too."""
    with tiered(codec=LINES[line], page=page, slots=220, stores=True) as engine:
        own_copy(engine, "a", "x", 30)
        engine.verify("a", 1)
        # Restored over its own codes, segment after segment.
        on_host(engine, "b", "w", 30)
        for move in (SwapOut, SwapIn):
            assert engine.move(move("b"), "b")
            until(lambda: not waiting(engine))
        engine.evict()
        left_behind(engine)


def own_copy(engine, *prompt):
    """Share draft KV of a prompt, swap it out and in, load it and offload it."""
    state, rid = on_host(engine, *prompt), prompt[0]
    assert state.split.shared_slots is not None
    for move in (SwapOut, SwapIn, Load, Offload):
        assert engine.move(move(rid), rid)
        if engine.cuda is not None:
            engine.cuda.drain()
        until(lambda: not waiting(engine))
        engine.checks.all()
    assert state.split.shared_slots is None
    engine.draft(rid)


# -- in a store ---------------------------------------------------------------------

TOKENS, SLOTS = 64, 400
SPECIAL = [0.0, -0.0, 1.0, 1e4, -1e4, 1e-40, 2**-126]
ID = "made offline"


class CodedWorld:
    """Copies of segments over a plain pool, with a codec and a store.

    Args:
        codec: Bound, as the runtime uses it.
        dtype: Of the KV.
        storage: Of the store; None: a new one.
    """

    def __init__(self, codec, dtype, storage=None):
        buffers = torch.zeros(2, LAYERS, SLOTS, HEADS, DIM, dtype=dtype)
        pool = SimpleNamespace(k_buffer=list(buffers[0]), v_buffer=list(buffers[1]))
        geometry = KVGeometry(
            layers=LAYERS,
            kv_heads=HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            element_bytes=dtype.itemsize,
            page_size=1,
        )
        pages = HostPagePool(1 << 22, 256, pinned=False)
        host = HostStore(geometry, dtype, pages, codec)
        transfers = ThreadTransfers(pool.k_buffer, pool.v_buffer, 0.0)
        self.handles = KVHandles(geometry, pool, torch.zeros(1, 1), host, transfers)
        self.copies = SegmentCopies(self.handles)
        self.codes = self.copies.codes = Codes(codec, self.handles)
        fingerprint = replace(
            IDENTITY.model,
            layers=LAYERS,
            kv_heads=HEADS,
            kv_dtype=str(dtype).removeprefix("torch."),
            head_dim=DIM,
            v_head_dim=DIM,
        )
        self.store = HeldStore(fingerprint, storage)
        check = partial(self.codes.check, tokens=TOKENS)
        self.store.codec = StoreCodec("this codec", TOKENS, check)

    def compressed(self, kv, coded):
        """Compress segment ``a`` of KV [2, L, T, H, D]; return its draft KV."""
        codes, kept = self.codes, coded.shape[2]
        budget = codes.segment(TOKENS, kept)
        slots = torch.randperm(SLOTS)[: budget.code_slots]
        residual = self.copies.open_residual("a", budget)
        residual.describe(coded[..., :0], coded)
        for layer in range(LAYERS):
            where = coded[layer].long()
            pair = [pick(side[layer], where) for side in kv]
            codes.put(layer, slots, codes.encode(layer, *pair, coded[layer]))
            residual.write(layer, *(side[layer] for side in kv))
        self.copies.index.settle_image("a", Form.RESIDUAL)
        part = SegmentDraft(slots, coded[..., :0], coded)
        self.copies.index.add_draft("a", part)
        return part

    def bits(self, slots):
        pool = self.handles.pool
        both = (pool.k_buffer, pool.v_buffer)
        found = [torch.stack([as_bits(b)[slots] for b in side]) for side in both]
        return torch.stack(found)


def some_kv(seed, dtype):
    """Return finite KV [2, L, T, H, D], with numbers of every kind among it."""
    random = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, LAYERS, TOKENS, HEADS, DIM, generator=random)
    special = torch.tensor(SPECIAL)
    where = torch.rand(kv.shape, generator=random) < 0.02
    chosen = torch.randint(len(SPECIAL), kv.shape, generator=random)
    return torch.where(where, special[chosen], kv).to(dtype)


def some_tokens(seed, kept):
    random = torch.Generator().manual_seed(seed)
    order = torch.rand(LAYERS, HEADS, TOKENS, generator=random).argsort()
    return order[..., :kept].sort().values.to(torch.int32)


def flipped(data, at):
    """Flip one bit of a stored object."""
    data[at // 8] ^= 1 << at % 8


@pytest.fixture(scope="module")
def codecs(tmp_path_factory):
    return bound_codecs(tmp_path_factory.mktemp("tables"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("line", ALL)
def test_every_codec_s_segment_comes_back_bit_by_bit_or_not_at_all(line, dtype, codecs):
    @settings(deadline=None, max_examples=4)
    @given(st.integers(0, 2**32), st.sampled_from([TOKENS, 32]), st.data())
    def round_trips(seed, kept, data):
        world = CodedWorld(codecs[line], dtype)
        kv, coded = some_kv(seed, dtype), some_tokens(seed, kept)
        part = world.compressed(kv, coded)
        draft, rest = world.copies.read_parts("a")
        assert world.store.put("a", {"draft": draft, "residual": rest}, ID)
        storage = world.store.storage
        other = CodedWorld(codecs[line], dtype, storage)
        found = other.store.restore("a", [ID])
        both = found.parts["draft"], found.parts["residual"]
        assert other.copies.take_split("a", *both, TOKENS)
        slots = torch.arange(TOKENS).flip(0)
        other.copies.restore("a", 0, slots)
        wanted = torch.stack([as_bits(side) for side in kv])
        assert torch.equal(other.bits(slots), wanted)
        used = world.codes.used(kept)
        there = torch.arange(100, 100 + used)
        other.copies.place_draft("a", there)
        assert torch.equal(other.bits(there), world.bits(part.slots[:used]))
        whole = other.copies.joined(*both, TOKENS)
        assert torch.equal(as_bits(whole["keys"]), wanted[0])
        # One flipped bit of any file, and the segment is prefilled.
        key = data.draw(st.sampled_from(sorted(storage.objects)))
        at = data.draw(st.integers(0, 8 * len(storage.objects[key]) - 1))
        flipped(storage.objects[key], at)
        assert CodedWorld(codecs[line], dtype, storage).store.restore("a") is None

    round_trips()


def test_another_codec_s_segment_is_a_miss(codecs):
    world = CodedWorld(codecs[ALL[0]], torch.float32)
    world.compressed(some_kv(0, torch.float32), some_tokens(0, 32))
    draft, rest = world.copies.read_parts("a")
    assert world.store.put("a", {"draft": draft, "residual": rest}, ID)
    store = CodedWorld(codecs[ALL[2]], torch.float32, world.store.storage).store
    assert store.lookup(["a"]) == 1, "the same codec"
    store.codec = replace(store.codec, identity="another codec")
    assert (store.lookup(["a"]), store.restore("a", [ID])) == (0, None)
    store.codec = None
    assert (store.lookup(["a"]), store.restore("a")) == (0, None)
    assert store.counters.damaged == 0


@pytest.mark.parametrize("what", ["infinite", "another count", "other codes"])
def test_codes_that_are_sealed_but_wrong_are_not_used(what, codecs):
    """A writer without a key may store anything; it must not end the server."""
    world = CodedWorld(codecs[ALL[0]], torch.float32)
    kv = some_kv(0, torch.float32)
    if what == "infinite":
        kv[0, 0, 0, 0, 0] = torch.inf
    world.compressed(kv, some_tokens(0, 32))
    draft, rest = world.copies.read_parts("a")
    if what == "another count":
        rest["counts"] = rest["counts"] + 1
    if what == "other codes":
        as_bits(draft["keys"]).random_(2**30)
    assert world.store.put("a", {"draft": draft, "residual": rest}, ID)
    assert world.store.restore("a", [ID]) is None
    assert world.store.counters.damaged == 1
    # Nor are they by a request that reads one part after the other.
    apart = CodedWorld(codecs[ALL[0]], torch.float32, world.store.storage).store
    found = apart.restore("a", [ID], "draft")
    if what == "other codes":
        assert found is None
    else:  # what is wrong is the residual KV
        rest = apart.follow_up([found])
        apart.arrive()
        assert rest.done
        assert not rest.found
    assert apart.counters.damaged == 1


def test_the_parts_of_codes_are_copied_one_by_one(codecs):
    world, other = (CodedWorld(codecs[ALL[0]], torch.float32) for _ in "ab")
    world.compressed(some_kv(0, torch.float32), some_tokens(0, 32))
    draft, rest = world.copies.read_parts("a")
    assert world.store.put("a", {"draft": draft, "residual": rest}, ID)
    for part in ("residual", "draft"):
        assert world.store.move("a", other.store, ID, part)
    assert other.store.restore("a", [ID]).parts.keys() == {"draft", "residual"}


@pytest.mark.parametrize("selects", [True, False])
@pytest.mark.parametrize("line", LINES)
def test_a_server_drafts_on_codes_that_another_has_stored(line, selects, monkeypatch):
    """Its packed draft KV is the very bytes, which nobody packs again."""
    drawn = KnownKV.drawn
    monkeypatch.setattr(KnownKV, "drawn", lambda *given: drawn(*given) & ~(1 << 30))
    options = {"codec": LINES[line], "selects": selects, "stores": True, "slots": 220}
    with tiered(**options) as one, tiered(**options) as other:
        first = with_store(one, None)
        on_host(one, "a")
        first.announce()
        names = one.names(one.ids("x", 30))
        second = with_store(other, first.storage)
        assert second.lookup(names) == 3
        other.segments.stored.fetch("b", names, 0)
        second.arrive()
        assert fetched(other.segments, "b")
        other.admit("b", "x", 30)
        assert other.segments.counters.match_host_tokens == 3 * SHORT
        monkeypatch.setattr(other.placement.codes, "encode", None)
        assert other.move(to("b", "host"), "b")
        other.checks.all()
        for name in names:
            mine, theirs = (
                engine.kv.at(engine.segments.draft(name).slots)
                for engine in (one, other)
            )
            assert torch.equal(mine, theirs)
            content = other.segments.copies.index.get(name).content
            rest = other.segments.residual(name)
            assert content.residual.nbytes == rest.nbytes_layer * rest.layers
        other.draft("b")
        other.verify("b", 1)
        assert other.move(Load("b"), "b")
        other.checks.all()
        assert other.move(Offload("b"), "b")
        other.verify("b", 0)
        left_behind(other)


def with_store(engine, storage):
    """Give an engine's segments a store."""
    segments = engine.segments
    store = attach_store(segments, storage, (), segments._identity.model)
    check = partial(segments.copies.codes.check, tokens=SHORT)
    store.codec = StoreCodec("this codec", SHORT, check)
    return store


@pytest.mark.parametrize("line", WIDE)
def test_a_device_joins_shared_codes_with_the_residual_kv_of_segments(
    line, monkeypatch
):
    for module in (segment_world, segment_checks, tiny_segments):
        monkeypatch.setattr(module, "SHORT", 16)
    shorten_segments(monkeypatch, ABOVE)
    with simulated() as cuda:
        cuda.runs = True
        options = {"cuda": cuda, "codec": WIDE[line], "dtype": torch.bfloat16}
        with tiered(slots=220, stores=True, keep=0.8, **options) as engine:
            state = on_host(engine, "a", "x", 44)
            until(lambda: not waiting(engine))
            assert state.split.shared_slots is not None
            on_host(engine, "b", "x/16/y", 44)
            until(lambda: not waiting(engine))
            for rid in "ab":
                engine.draft(rid)
                engine.verify(rid, 1)
            assert engine.move(Load("a"), "a")
            cuda.drain()
            engine.checks.all()
            assert engine.move(Offload("a"), "a")
            engine.verify("a", 0)
            for rid in "ab":
                engine.finish(rid)
            engine.evict()
            cuda.drain()
            engine.checks.all()
            restored, _ = engine.match("c", engine.ids("x", 44))
            cuda.drain()
            kv, _ = engine.kv.truth("x")
            assert len(restored) == 32
            assert torch.equal(engine.kv.at(restored), kv[:, :, :32])
            own_copy(engine, "d", "w", 44)
            engine.verify("d", 1)
            assert engine.move(Load("d"), "d")
            cuda.drain()
            engine.checks.all()


def waiting(engine):
    """Return whether copies to the host are under way."""
    engine.placement.poll_outgoing()
    return engine.placement._outgoing
