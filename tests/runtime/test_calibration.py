"""What is timed at boot: sane numbers, and nothing left behind."""

from types import SimpleNamespace

import pytest
import torch
from simulated_cuda import simulated

from vericache_sglang.errors import TransferError
from vericache_sglang.kv import calibration
from vericache_sglang.kv.calibration import measure_link, starting_coefficients
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.handles import KVHandles
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.host_store import HostStore
from vericache_sglang.kv.staging import StagingBuffer
from vericache_sglang.kv.transfers import open_transfers
from vericache_sglang.scheduling.estimates import START_COEFFICIENTS
from vericache_sglang.scheduling.link import LinkEstimate

GEOMETRY = KVGeometry(
    layers=2, kv_heads=2, head_dim=16, v_head_dim=16, element_bytes=4, page_size=1
)


def pool(slots, where=torch.clone):
    keys, values = ([where(torch.zeros(slots, 2, 16))] * 2 for _ in range(2))
    return SimpleNamespace(k_buffer=keys, v_buffer=values)


def handles(gbps, where=torch.clone, host_bytes=1 << 21):
    made = pool(6000, where)
    page_pool = HostPagePool(host_bytes, 1 << 10, pinned=where is not torch.clone)
    host = HostStore(GEOMETRY, torch.float32, page_pool)
    transfers = open_transfers(made.k_buffer, made.v_buffer, gbps)
    return KVHandles(GEOMETRY, made, torch.zeros(1, 1), host, transfers)


def test_the_emulated_link_is_found_out_and_the_region_given_back():
    region = StagingBuffer(3000, 3000)
    link = LinkEstimate(8e9)
    measure_link(handles(0.1), region, link)
    for direction in ("in", "out"):
        assert link.bytes_per_s(1 << 21, direction) <= 0.1e9 * 1.01
        assert link.bytes_per_s(1 << 10, direction) <= 0.1e9 * 1.01
    assert region.used == 0


def test_the_link_of_a_device_is_timed_by_copies_of_its_own():
    """A block the host made has no stream to be kept for."""
    with simulated(seed=1) as device:
        device.runs = True
        made = handles(0.0, device.put)
        region, link = StagingBuffer(3000, 3000), LinkEstimate(8e9)
        measure_link(made, region, link)
        made.transfers.close()
        assert made.host.used_bytes == 0
        for direction in ("in", "out"):
            assert link.bytes_per_s(1 << 21, direction) != 8e9
        assert region.used == 0
        assert device.waits == []


@pytest.mark.parametrize(("slots", "nbytes"), [(16, 1 << 21), (3000, 1 << 13)])
def test_without_room_to_time_the_start_is_left(slots, nbytes):
    link, region = LinkEstimate(8e9), StagingBuffer(3000, slots)
    measure_link(handles(0.0, host_bytes=nbytes), region, link)
    assert link.bytes_per_s(1 << 21, "in") == 8e9
    assert region.used == 0


def test_a_link_that_fails_is_reported_and_leaves_the_start(caplog):
    class Failing:
        nbytes, seconds = 1, 1.0

        def done(self):
            raise TransferError("layer 0")

    broken = handles(0.0)
    broken.transfers.start = lambda image, lease, drafts: Failing()
    region, link = StagingBuffer(3000, 3000), LinkEstimate(8e9)
    measure_link(broken, region, link)
    assert link.bytes_per_s(1 << 21, "in") == 8e9
    assert region.used == 0
    assert "could not be timed" in caplog.text


LAYERS = [SimpleNamespace(tp_q_head_num=4, head_dim=16, scaling=0.25)] * 2


def test_attention_is_timed_on_the_pool():
    found = starting_coefficients(pool(6000), LAYERS, draft_length=8)
    assert found.base_s == START_COEFFICIENTS.base_s
    assert 0 < found.per_read_s < 1e-4
    assert 0 < found.per_product_s < 1e-4


@pytest.mark.parametrize("slots", [1, 511])
def test_a_pool_too_small_to_time_keeps_the_assumed_costs(slots):
    assert starting_coefficients(pool(slots), LAYERS, 8) == START_COEFFICIENTS


def test_rows_that_all_take_the_same_time_keep_the_assumed_costs(monkeypatch, caplog):
    monkeypatch.setattr(calibration, "seconds_of", lambda run, device: 1e-3)
    assert starting_coefficients(pool(6000), LAYERS, 8) == START_COEFFICIENTS
    assert "could not be timed" in caplog.text
