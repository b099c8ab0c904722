"""Layers can be used one by one as they arrive, and segments are one complement."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch
from stream_link import (
    LAYERS,
    LEASE,
    NO_DRAFTS,
    PLACES,
    at,
    new_complement,
    new_pool,
    wanted,
)

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.thread_transfers import ThreadTransfers

SLOW = 1e-6
"""GB/s at which a layer takes a second and more."""


@contextmanager
def opened(gbps=0.0):
    pool = new_pool()
    link = ThreadTransfers(*pool, gbps)
    try:
        yield link, pool
    finally:
        link.close()


def test_a_layer_is_awaited_until_its_bytes_are_there():
    complement, seconds = new_complement((16,)), 0.15
    with opened(complement.nbytes / seconds / 1e9) as (link, pool):
        began = time.perf_counter()
        transfer = link.start(complement, LEASE, NO_DRAFTS)
        for layer in range(LAYERS):
            transfer.await_layer(layer)
            share = seconds * (layer + 1) / LAYERS
            assert time.perf_counter() - began >= share * 0.9
            assert at(pool, layer, PLACES) == wanted(complement, layer)
        assert transfer.layer_s >= seconds / LAYERS * 0.9
        with pytest.raises(InvariantError, match="layer 3 of a copy of 3"):
            transfer.await_layer(LAYERS)


def test_who_awaits_a_layer_that_never_comes_hears_why():
    complement = new_complement((16,))
    complement.keys.view(torch.uint8)[1, 0, 0, 0] ^= 1
    with opened() as (link, _):
        damaged = link.start(complement, LEASE, NO_DRAFTS)
        damaged.await_layer(0)
        for layer in (1, 2):
            with pytest.raises(TransferError, match="checksum differs in layer 1"):
                damaged.await_layer(layer)


def test_who_awaits_a_cancelled_copy_hears_of_it():
    with opened(SLOW) as (link, _):
        running, waiting = (
            link.start(new_complement((16,)), LEASE, NO_DRAFTS) for _ in range(2)
        )
        assert (running.layer_s, running.layers_done) == (0.0, 0)
        for transfer, message in (
            (waiting, "cancelled before layer 0"),
            (running, "cancelled in layer 0"),
        ):
            threading.Timer(0.02, transfer.cancel).start()
            with pytest.raises(TransferError, match=message):
                transfer.await_layer(0)


@pytest.mark.parametrize("counts", [(16,), (5, 11), (1, 7, 4, 4)])
def test_segments_arrive_one_behind_the_other(counts):
    complement = new_complement(counts)
    with opened() as (link, pool):
        fresh = new_pool()
        transfer = link.start(complement, LEASE, NO_DRAFTS)
        transfer.await_layer(LAYERS - 1)
        others = [slot for slot in range(len(pool[0][0])) if slot not in PLACES]
        for layer in range(LAYERS):
            assert at(pool, layer, PLACES) == wanted(complement, layer)
            assert at(pool, layer, others) == at(fresh, layer, others)
