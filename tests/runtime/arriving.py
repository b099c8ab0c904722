"""Reloads over real copies that go on layer by layer when the test lets them."""

import threading
import time
from contextlib import contextmanager

import torch

from vericache_sglang.compression.budget import Budget
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.host_store import HostStore
from vericache_sglang.kv.ledger import Ledger
from vericache_sglang.kv.prefetch import StagingPrefetcher
from vericache_sglang.kv.residual import RawResidual
from vericache_sglang.kv.split_layers import as_bits
from vericache_sglang.kv.staging import StagingBuffer
from vericache_sglang.kv.thread_transfers import ThreadTransfers
from vericache_sglang.observability.counters import Counters
from vericache_sglang.observability.link_log import LinkLog
from vericache_sglang.scheduling.link import LinkEstimate

LAYERS, SLOTS, HEADS, DIM = 4, 6, 2, 4
START, ROOM = 10, 3 * SLOTS
"""First staging slot, and how many there are."""

BUDGET = Budget(SLOTS + 2, 2, 0, 0)
GEOMETRY = KVGeometry(
    layers=LAYERS,
    kv_heads=HEADS,
    head_dim=DIM,
    v_head_dim=DIM,
    element_bytes=4,
    page_size=1,
)


class Prefetching:
    """Reloads of requests that have a complement each.

    Attributes:
        let: By layer, how often it may still be checked; a copy stops there.
    """

    def __init__(self, gbps=0.0):
        shape = (START + ROOM, HEADS, DIM)
        self.keys = [torch.zeros(shape) for _ in range(LAYERS)]
        self.values = [torch.zeros(shape) for _ in range(LAYERS)]
        page_pool = HostPagePool(1 << 16, 64, pinned=False)
        self.host = HostStore(GEOMETRY, torch.float32, page_pool)
        self.counters, self.ledger = Counters(), Ledger()
        self.estimate = LinkEstimate(1e9)
        self.link = LinkLog(self.estimate)
        self.transfers = ThreadTransfers(self.keys, self.values, gbps)
        self.prefetches = StagingPrefetcher(
            StagingBuffer(START, ROOM),
            self.transfers,
            self.host,
            self.ledger,
            self.counters,
            self.link,
        )
        self.let = [threading.Semaphore(0) for _ in range(LAYERS)]

    def read(self, rid):
        """Return the bits a verification of a request reads, by layer."""
        spans = self.prefetches.spans(rid)
        slots = [slot for span in spans for slot in range(span.start, span.end)]
        return [
            [as_bits(buffer)[slots].tolist() for buffer in pair]
            for pair in zip(self.keys, self.values, strict=True)
        ]

    def keep(self, rid, seed=0):
        """Give a request a complement of random bits."""
        made = self.host.open(rid, BUDGET)
        generator = torch.Generator().manual_seed(seed)
        for layer in range(LAYERS):
            made.kept[layer].zero_()
            pair = (
                torch.randint(0, 1 << 31, (SLOTS, HEADS, DIM), generator=generator).to(
                    torch.int32
                )
                for _ in range(2)
            )
            made.write(layer, *(each.view(torch.float32) for each in pair))
        return made

    def bits(self, rid):
        """Return the bits of a request's complement, by layer."""
        made = self.host.residual(rid)
        return [
            [as_bits(side).tolist() for side in pair]
            for pair in zip(made.keys, made.values, strict=True)
        ]

    def damage(self, rid, layer):
        """Flip a bit of a layer; again, and it is as it was."""
        byte = self.host.residual(rid).values[layer].view(torch.uint8).view(-1)[5:6]
        byte ^= 1

    def start(self, rid, key=None):
        return self.prefetches.start(rid, key or rid, lambda layer: [])

    def allow(self, *layers):
        """Let copies go on with these layers."""
        for layer in layers:
            self.let[layer].release()


def until(condition, seconds=120.0):
    """Wait for the copy's thread."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "a copy never got there"
        time.sleep(1e-4)


@contextmanager
def prefetching(gbps=0.0, held=True):
    """Open ``Prefetching``; with ``held`` a layer is copied when it was allowed.

    Whoever checks a layer's bytes, the copy's thread, waits for that.
    """
    world = Prefetching(gbps)
    verify = RawResidual.verify

    def slow(self, layer):
        if held:
            world.let[layer].acquire()
        verify(self, layer)

    RawResidual.verify = slow
    try:
        yield world
    finally:
        RawResidual.verify = verify
        for layer in range(LAYERS):
            world.let[layer].release(50)
        world.transfers.close()
