"""Transfers over a device of the test's own, and KV whose bits are known."""

from contextlib import contextmanager
from functools import partial

import torch
from simulated_cuda import simulated, until
from simulated_tensors import CUDA

from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.residual import RawResidual
from vericache_sglang.kv.segmented_residual import SegmentedResidual
from vericache_sglang.kv.split_layers import as_bits
from vericache_sglang.kv.staging import Lease, Span
from vericache_sglang.kv.stream_transfers import StreamTransfers

LAYERS, POOL, DTYPE = 3, 64, torch.bfloat16
GEOMETRY = KVGeometry(
    layers=LAYERS,
    kv_heads=2,
    head_dim=4,
    v_head_dim=6,
    element_bytes=2,
    page_size=1,
)
LEASE = Lease((Span(3, 5), Span(20, 1), Span(30, 12)))
PLACES = [*range(3, 8), 20, *range(30, 40)]
"""The first 16 slots of the lease."""


def scramble(tensor, seed):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (tensor.nbytes,), generator=generator)
    tensor.view(torch.uint8).view(-1).copy_(raw)
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
    for i, each in enumerate(image.members):
        for side, name in enumerate(("keys", "values")):
            content = torch.empty(each.tensors[name].shape, dtype=DTYPE)
            each.tensors[name].write(scramble(content, seed + 2 * i + side))
        if isinstance(each, RawResidual):
            each.describe(torch.zeros(LAYERS, 2, 1, dtype=torch.int32), None)
    for layer in range(LAYERS):
        image.seal(layer)
    return image


def new_pages(neighbours=True):
    """Return pages of six keys; else no two of the free ones are neighbours."""
    page_pool = HostPagePool(96 * (128 if neighbours else 256), 96, pinned=True)
    single = [page_pool.take(1) for _ in range(0 if neighbours else 256)]
    for each in single[::2]:
        each.free()
    return page_pool


def new_residual(counts, page_pool=None):
    """Return a complement of 16 slots: of segments where there are several counts."""
    page_pool = page_pool or new_pages()
    made = [RawResidual(GEOMETRY, n, 1, DTYPE, page_pool) for n in counts]
    return filled(made[0] if len(made) == 1 else SegmentedResidual(made))


def wanted(residual, layer):
    """Return a layer's keys and values as they lie in host memory."""
    sides = residual.sides(layer)
    return tuple([row for block in side for row in bits(block)] for side in sides)


def at(pool, layer, places):
    """Return what is in slots of a layer now; the device is not waited for."""
    pair = (getattr(side[layer], "memory", side[layer]) for side in pool)
    return tuple(bits(buffer[places]) for buffer in pair)


class Link:
    """Transfers of a pool, closed at the end; forwards that note what they read."""

    def __init__(self, clock):
        self.clock = clock
        self.pool = [[clock.put(buffer) for buffer in side] for side in new_pool()]
        self.copies = StreamTransfers(*self.pool)
        self.read = []

    def launch(self, *layers):
        """Launch a forward that reads the places of these layers."""
        for layer in layers:
            self.clock.main.put(
                lambda layer=layer: self.read.append(at(self.pool, layer, PLACES))
            )

    def finish(self, transfer):
        until(transfer.future.done)
        self.clock.drain()
        assert transfer.done()


@contextmanager
def opened(seed):
    """Open a link over a device that takes its work in an order of this seed."""
    with simulated(seed) as clock:
        link = Link(clock)
        try:
            yield link
        finally:
            link.copies.close()


def leaving(link, seed):
    """Yield each layer's entries, made on the device when it gets there."""
    for layer in range(LAYERS):
        pair = [torch.empty(16, 2, dim, dtype=DTYPE, device=CUDA) for dim in (4, 6)]
        for i, block in enumerate(pair):
            link.clock.kernel(partial(scramble, seed=seed + 10 * layer + i), block)
        yield pair
