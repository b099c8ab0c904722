"""Transfers over a device of the test's own, and KV whose bits are known."""

from contextlib import contextmanager

import torch
from device_clock import COPY, device, until

from vericache_sglang.memory.complement import RawComplement
from vericache_sglang.memory.geometry import KVGeometry
from vericache_sglang.memory.segmented import SegmentedComplement
from vericache_sglang.memory.splitting import as_bits
from vericache_sglang.memory.staging import Lease, Span
from vericache_sglang.memory.stream_transfers import StreamTransfers

LAYERS, POOL, DTYPE = 3, 64, torch.bfloat16
GEOMETRY = KVGeometry(
    layers=LAYERS,
    kv_heads=2,
    head_dim=4,
    v_head_dim=6,
    element_bytes=2,
    page_size=1,
)
NO_DRAFTS = dict.fromkeys(range(LAYERS), ()).get
LEASE = Lease((Span(3, 5), Span(20, 1), Span(30, 12)))
PLACES = [*range(3, 8), 20, *range(30, 40)]
"""The first 16 slots of the lease."""


def scramble(tensor, seed):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (tensor.nbytes,), generator=generator)
    COPY(tensor.view(torch.uint8).view(-1), raw)
    return tensor


def new_pool():
    shapes = [(POOL, 2, 4)] * LAYERS, [(POOL, 2, 6)] * LAYERS
    pool = [[torch.zeros(s, dtype=DTYPE) for s in kind] for kind in shapes]
    for i, buffer in enumerate([*pool[0], *pool[1]]):
        scramble(buffer, 100 + i)
    return pool


def bits(tensor):
    return as_bits(tensor).tolist()


def filled(image, seed=1):
    """Fill an image, or every image of a segmented one, and seal it."""
    for i, each in enumerate(image.images):
        scramble(each.keys, seed + 2 * i)
        scramble(each.values, seed + 2 * i + 1)
        if isinstance(each, RawComplement):
            each.kept.zero_()
    for layer in range(LAYERS):
        image.seal(layer)
    return image


def new_complement(counts, arena=None):
    """Return a complement of 16 slots: of segments where there are several counts."""
    made = [RawComplement(GEOMETRY, n, 1, DTYPE, arena) for n in counts]
    return filled(made[0] if len(made) == 1 else SegmentedComplement(made))


def wanted(complement, layer):
    """Return a layer's keys and values as they lie in host memory."""
    images = complement.images
    keys = [row for image in images for row in bits(image.keys[layer])]
    return keys, [row for image in images for row in bits(image.values[layer])]


def at(pool, layer, places):
    return bits(pool[0][layer][places]), bits(pool[1][layer][places])


class Link:
    """Transfers of a pool, closed at the end; forwards that note what they read."""

    def __init__(self, clock):
        self.clock = clock
        self.pool = new_pool()
        self.copies = StreamTransfers(*self.pool)
        self.read = []

    def launch(self, *layers):
        """Launch a forward that reads the places of these layers."""
        for layer in layers:
            self.clock.forward.put(
                lambda layer=layer: self.read.append(at(self.pool, layer, PLACES))
            )

    def finish(self, transfer):
        until(transfer.future.done)
        self.clock.drain()
        assert transfer.done()


@contextmanager
def opened(seed):
    """Open a link over a device that takes its work in an order of this seed."""
    with device(seed) as clock:
        link = Link(clock)
        try:
            yield link
        finally:
            clock.drain()
            link.copies.close()


def leaving(link, seed):
    """Yield each layer's entries, gathered on the device when it gets there.

    What is not kept for the copy's stream is the allocator's at once, and overwritten.
    """
    for layer in range(LAYERS):
        pair = tuple(torch.zeros(16, 2, dim, dtype=DTYPE) for dim in (4, 6))
        for i, block in enumerate(pair):
            link.clock.forward.put(
                lambda block=block, i=i, layer=layer: scramble(
                    block, seed + 10 * layer + i
                )
            )
        yield pair
        for block in pair:
            if not any(block is each for each in link.clock.recorded):
                link.clock.forward.put(lambda block=block: scramble(block, 9))
