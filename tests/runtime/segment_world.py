"""Cached segments over a plain pool: short ones, of random bits, and their owners."""

from types import SimpleNamespace

import torch
from storages import HeldStore

from vericache_sglang.compression.budget import Budget
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.handles import KVHandles
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.host_store import HostStore
from vericache_sglang.kv.thread_transfers import ThreadTransfers
from vericache_sglang.prefix_cache.cached_segments import CachedSegments
from vericache_sglang.prefix_cache.ranks import Ranks
from vericache_sglang.prefix_cache.restore_costs import Prices
from vericache_sglang.prefix_cache.segment_copies import SegmentCopies
from vericache_sglang.prefix_cache.segment_images import SegmentDraft
from vericache_sglang.prefix_cache.segment_tiers import Identity
from vericache_sglang.prefix_cache.store.keys import Fingerprint
from vericache_sglang.prefix_cache.store.stored_segments import StoredSegments

SHORT = 8
"""Tokens of a segment in these tests."""

KEPT = 3
"""Tokens of it that stay on the device where it is split."""

LAYERS, HEADS, DIM = 2, 2, 4

BITS = {2: torch.int16, 4: torch.int32}

NAN = {torch.float32: 0x7F800001, torch.bfloat16: 0x7F81, torch.float16: 0x7C01}
"""Signalling NaNs: whoever computes with one gets another."""


MODULES = ("segment_slots", "segment_tiers", "cached_segments", "whole_segments")
"""Modules of the engine that know how long a segment is, and not of SGLang."""

IDENTITY = Identity(
    Fingerprint(
        model="m",
        weights="w",
        dtype="float32",
        kv_dtype="float32",
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
    ),
    "keeps three of eight",
)

PRICES = Prices(
    link_in_s_per_byte=1e-9,
    link_out_s_per_byte=1e-9,
    store_latency_s=0.0,
    store_s_per_byte=1e-8,
    prefill_s_per_token=1e-3,
    prefill_s_per_square=0.0,
)


class Scores:
    """Scores of tokens by slot, as ``PrefillObserver`` keeps them.

    Attributes:
        table: [L, H, slots].
    """

    def __init__(self, slots):
        self.table = torch.full((LAYERS, HEADS, slots), torch.nan)

    def noted(self, slots):
        return list(self.table[:, :, slots])

    def note(self, slots, scores):
        if scores:
            self.table[:, :, slots] = torch.stack(scores)


def tiers_of(segment):
    """Return the tiers in which a segment has parts, as the index has it."""
    return {held.tier for _, held in segment.content.parts}


def shorten_segments(monkeypatch, more=()):
    """Make segments short, in the modules that took the constant over."""
    for module in (*MODULES, *more):
        monkeypatch.setattr(f"vericache_sglang.prefix_cache.{module}.SEGMENT", SHORT)


class Alone(Ranks):
    """A single rank, with fixed prices."""

    def __init__(self):
        super().__init__(None)

    def prices(self, stored):
        return PRICES


class SegmentWorld:
    """What ``CachedSegments`` works on, and KV of every name; all in the open.

    Attributes:
        nans: Some entries are NaNs; False for tests with a store, which refuses them.

    Args:
        slots: Of the pool.
        host: Bytes of host memory, in pages of 64.
        dtype: Of the KV.
        ranks: Of several ranks; None: there is one.
    """

    nans = True

    def __init__(self, slots=96, host=1 << 20, dtype=torch.float32, ranks=None):
        shape = (slots, HEADS, DIM)
        self.bits = BITS[dtype.itemsize]
        self.buffers = [torch.zeros(2, *shape, dtype=dtype) for _ in range(LAYERS)]
        pool = SimpleNamespace(
            k_buffer=[each[0] for each in self.buffers],
            v_buffer=[each[1] for each in self.buffers],
        )
        geometry = KVGeometry(
            layers=LAYERS,
            kv_heads=HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            element_bytes=dtype.itemsize,
            page_size=1,
        )
        self.page_pool = HostPagePool(host, 64, pinned=False)
        store = HostStore(geometry, dtype, self.page_pool)
        transfers = ThreadTransfers(pool.k_buffer, pool.v_buffer, 0.0)
        self.handles = KVHandles(geometry, pool, torch.zeros(1, 1), store, transfers)
        self.copies = SegmentCopies(self.handles)
        self.index = self.copies.index
        self.scores = self.copies.scores = Scores(slots)
        self.free = set(range(slots))
        self.segments = CachedSegments(
            self.copies, self.handles, IDENTITY, self.give, ranks or Alone()
        )
        self._random = torch.Generator().manual_seed(1)
        self._truths = {}

    def truth(self, name):
        """Return what a segment's KV is: bits [L, 2, SHORT, H, D]."""
        if name not in self._truths:
            dtype = self.handles.host.dtype
            shape = (LAYERS, 2, SHORT, HEADS, DIM * dtype.itemsize)
            raw = torch.randint(0, 256, shape, generator=self._random)
            made = raw.to(torch.uint8)
            # One bit less of the exponent: all are finite.
            made[..., self.bits.itemsize - 1 :: self.bits.itemsize] &= 0xBF
            made = made.view(self.bits)
            if self.nans:
                made[:, :, 0, :, 0] = NAN[dtype]
            self._truths[name] = made
        return self._truths[name]

    def truth_scores(self, name):
        """Return what a segment's tokens scored, [L, H, SHORT]."""
        random = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
        return torch.randn(LAYERS, HEADS, SHORT, generator=random)

    def kept(self, name):
        """Return the tokens [L, H, KEPT] that a split of a segment keeps."""
        random = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
        rows = [
            torch.randperm(SHORT, generator=random)[:KEPT].sort().values
            for _ in range(LAYERS * HEADS)
        ]
        return torch.stack(rows).view(LAYERS, HEADS, KEPT).to(torch.int32)

    def take(self, count):
        """Take free slots, the highest first; None where there are too few."""
        if len(self.free) < count:
            return None
        taken = sorted(self.free)[-count:]
        self.free -= set(taken)
        return torch.tensor(taken)

    def give(self, slots):
        """Take slots back; what they held, and its scores, are another's at once."""
        listed = set(slots.tolist())
        assert not listed & self.free, "freed twice"
        self.free |= listed
        self.put(slots, torch.full((LAYERS, 2, len(slots), HEADS, DIM), 77))
        self.scores.table[:, :, slots] = 77.0

    def put(self, slots, bits):
        for layer, both in enumerate(self.buffers):
            both.view(self.bits)[:, slots] = bits[layer].to(self.bits)

    def at(self, slots):
        """Return the pool's bits [L, 2, n, H, D]."""
        return torch.stack([both.view(self.bits)[:, slots] for both in self.buffers])

    def of(self, name, where):
        """Return a segment's bits of the tokens [L, H, n], head by head."""
        kv, n = self.truth(name), where.shape[2]
        found = torch.empty(LAYERS, 2, n, HEADS, DIM, dtype=self.bits)
        for layer in range(LAYERS):
            for head in range(HEADS):
                for i, token in enumerate(where[layer, head].tolist()):
                    found[layer, :, i, head] = kv[layer, :, token, head]
        return found

    def away(self, name):
        """Return the tokens [L, H, m] that a split of a segment drops."""
        every = range(SHORT)
        layers = self.kept(name).tolist()
        return torch.tensor(
            [[[i for i in every if i not in row] for row in rows] for rows in layers]
        )

    def write_text(self, names):
        """Put a text's segments into slots, as a prefill does; None without room."""
        slots = self.take(SHORT * len(names))
        if slots is not None:
            for at, name in enumerate(names):
                own = slots[at * SHORT : (at + 1) * SHORT]
                self.put(own, self.truth(name))
                self.scores.table[:, :, own] = self.truth_scores(name)
        return slots

    def draft(self, name):
        """Make a segment's draft part; None without room."""
        slots = self.take(KEPT)
        if slots is None:
            return None
        self.put(slots, self.of(name, self.kept(name)))
        return SegmentDraft(slots, self.kept(name))

    def fill(self, name, residual):
        """Fill a new complement as a split does."""
        kept, bits = self.kept(name), self.of(name, self.away(name))
        dtype = self.handles.host.dtype
        residual.describe(kept, kept[..., :0])
        for layer in range(LAYERS):
            residual.write(layer, *bits[layer].view(dtype))

    def split(self, name):
        """Put a segment's draft part on the shelf, and its complement on the host."""
        self.index.add_draft(name, self.draft(name))
        self.fill(name, self.copies.open_residual(name, Budget(SHORT, KEPT, 0, 0)))
        assert self.copies.save_scores(name, self.truth_scores(name))

    def damage(self, name):
        """Flip a bit of what the host has of a segment."""
        segment = self.index.find(name)
        for image in (
            [segment.residual] if segment.residual else segment.images.values()
        ):
            image.tensors["keys"].raw(LAYERS - 1)[0][0] ^= 1

    def forms(self, name):
        """Return the names of the host images of a segment."""
        return {form.name for form in self.index.find(name).images}


def attach_store(segments, storage=None, better=(), fingerprint=IDENTITY.model):
    """Give cached segments a store, which ends reads and writes when it is told to."""
    store = HeldStore(fingerprint, storage)
    segments.stored = StoredSegments(
        store,
        IDENTITY.compressor,
        segments.take_in,
        better,
        SHORT,
        kept=lambda: segments.kept,
    )
    return store


def with_segments(host=1 << 20, storage=None, better=()):
    """Return a world whose segments have a store, and the store."""
    world = SegmentWorld(host=host)
    return world, attach_store(world.segments, storage, better)


def fetched(segments, rid):
    """Take in what came for a request; False while it is to wait, as SGLang asks."""
    count = segments.stored.found(rid)
    return count is not None and segments.stored.take(rid, count)
