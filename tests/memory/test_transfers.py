"""Complements arrive as they left; cancelled and damaged ones never pass for good."""

import time

import pytest
import torch

from vericache_sglang.errors import TransferError
from vericache_sglang.memory.complement import Complement, HostStore
from vericache_sglang.memory.geometry import KVGeometry
from vericache_sglang.memory.staging import Span
from vericache_sglang.memory.transfers import ThreadTransfers

GEOMETRY = KVGeometry(
    layers=3, kv_heads=2, head_dim=4, v_head_dim=4, element_bytes=4, page_size=1
)


@pytest.fixture
def complement():
    filled = Complement(GEOMETRY, 16, 4, torch.float32)
    filled.keys.normal_(generator=torch.Generator().manual_seed(1))
    filled.values.normal_(generator=torch.Generator().manual_seed(2))
    for layer in range(3):
        filled.seal(layer)
    return filled


@pytest.fixture
def pool():
    return [torch.zeros(64, 2, 4) for _ in range(6)]


def wait(transfer, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not transfer.done():
        assert time.monotonic() < deadline, "the copy never finished"
        time.sleep(0.001)


def test_every_layer_arrives_in_its_span(complement, pool):
    link = ThreadTransfers(pool[:3], pool[3:], link_gbps=0.0)
    wait(link.start(complement, Span(40, 16)))
    link.close()
    for layer in range(3):
        assert torch.equal(pool[layer][40:56], complement.keys[layer])
        assert torch.equal(pool[3 + layer][40:56], complement.values[layer])
        assert not pool[layer][:40].any()
        assert not pool[layer][56:].any()


def test_bfloat16_travels_too():
    filled = Complement(GEOMETRY, 16, 4, torch.bfloat16)
    filled.keys.fill_(1.5)
    filled.values.fill_(-2.0)
    for layer in range(3):
        filled.seal(layer)
    pool = [torch.zeros(20, 2, 4, dtype=torch.bfloat16) for _ in range(6)]
    link = ThreadTransfers(pool[:3], pool[3:], link_gbps=0.0)
    wait(link.start(filled, Span(4, 16)))
    link.close()
    assert pool[2][4:].eq(1.5).all()
    assert pool[5][4:].eq(-2.0).all()


def test_an_emulated_link_takes_its_time(complement, pool):
    seconds = 0.2
    gbps = (complement.keys.nbytes + complement.values.nbytes) / seconds / 1e9
    link = ThreadTransfers(pool[:3], pool[3:], link_gbps=gbps)
    transfer = link.start(complement, Span(0, 16))
    assert not transfer.done()
    wait(transfer)
    link.close()
    assert transfer.seconds >= seconds


def test_cancel_returns_when_nothing_writes_any_more(complement, pool):
    link = ThreadTransfers(pool[:3], pool[3:], link_gbps=1e-6)
    transfer = link.start(complement, Span(0, 16))
    time.sleep(0.01)
    link_waits = ThreadTransfers(pool[:3], pool[3:], link_gbps=0.0)
    transfer.stopped.set()
    link_waits.close()
    behind = link.start(complement, Span(20, 16))
    behind.cancel()
    assert not pool[0][20:36].any(), "a cancelled copy that had not begun wrote nothing"


def test_damage_in_host_memory_is_noticed(complement, pool):
    complement.values[2, 3, 1, 0] += 1e-6
    link = ThreadTransfers(pool[:3], pool[3:], link_gbps=0.0)
    transfer = link.start(complement, Span(0, 16))
    with pytest.raises(TransferError, match="checksum differs in layer 2"):
        wait(transfer)
    link.close()


def test_the_host_budget_counts_every_complement():
    slots = 16
    store = HostStore(GEOMETRY, torch.float32, 2 * slots * GEOMETRY.token_bytes + 1000)
    assert store.fits(slots)
    store.open("a", slots, 4)
    assert store.fits(slots)
    store.open("b", slots, 4)
    assert not store.fits(slots)
    store.drop("a")
    store.drop("nobody")
    assert store.fits(slots)
    store.drop("b")
    assert store.used_bytes == 0
