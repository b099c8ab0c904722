"""Section 4.1's worked example by hand."""

import pytest

from vericache_sglang.planning.hardware import Machine, gpu_named, machine_of
from vericache_sglang.planning.paper.cycle import (
    Batch,
    draft_s,
    lock_step,
    prefetch_s,
    sequential,
    staggered,
)

MACHINE = Machine(
    name="round numbers",
    memory_bytes=1e3,
    hbm_bytes_per_s=100.0,
    link_bytes_per_s=2.0,
    flops_per_s=1.0,
)
BATCH = Batch(requests=4, weight_bytes=30, kv_full_bytes=10, keep=0.5, draft_length=5)


def test_worked_example_as_printed():
    machine = machine_of(gpu_named("rtx-pro-6000"), memory_share=1.0)
    batch = Batch(
        requests=10, weight_bytes=50e9, kv_full_bytes=4e9, keep=0.25, draft_length=30
    )
    assert round(1e3 * draft_s(batch, machine)) == 35
    assert round(1e3 * draft_s(batch, machine, verifies=1)) == 37
    assert round(1e3 * prefetch_s(batch, machine)) == 80
    assert lock_step(batch, machine).exposed_transfer_s == pytest.approx(0.8)
    assert sequential(batch, machine).exposed_transfer_s == pytest.approx(0.8)
    assert staggered(batch, machine).exposed_transfer_s == 0
    assert staggered(batch, machine).peak_bytes == 64e9
    assert sequential(batch, machine).peak_bytes == 64e9
    assert lock_step(batch, machine).peak_bytes == 90e9
    # "~20x the iteration window"
    assert 0.8 / draft_s(batch, machine, verifies=1) == pytest.approx(21.5, abs=0.1)


def test_only_what_drafts_cannot_hide_is_exposed():
    # Four reloads of 5 s under five drafts of (30 + 20) / 100 s.
    assert staggered(BATCH, MACHINE).exposed_transfer_s == pytest.approx(20 - 2.5)
