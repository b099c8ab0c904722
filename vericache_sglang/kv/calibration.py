"""Initial iteration-cost estimates, measured at boot on the machine itself."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from vericache_kernels.ragged_attention import RaggedRows, ragged_attention
from vericache_kernels.run_attention import run_attention
from vericache_sglang.errors import TransferError
from vericache_sglang.kv.residual import RawResidual
from vericache_sglang.scheduling.estimates import START_COEFFICIENTS
from vericache_sglang.scheduling.iteration_model import Coefficients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.staging import Lease, StagingBuffer
    from vericache_sglang.kv.transfers import Transfer
    from vericache_sglang.scheduling.link import LinkEstimate

logger = logging.getLogger(__name__)

SHORT, LONG = 256, 4096
"""Row lengths timed, in slots."""

LINK_SLOTS = (32, 2048)
"""Slots of the copies that time the link."""

TIMED_ROWS = 16
"""Block-table rows per timed attention call: enough to occupy a GPU."""

REPEATS = 5
LEAST_S = 1e-13

PAUSE_CYCLES = 20_000_000
"""Cycles a GPU pauses before it is timed, some 10 ms: it finds all launches queued."""


def measure_link(handles: KVHandles, region: StagingBuffer, link: LinkEstimate) -> None:
    """Time a small and a large copy in each direction, for the first decisions.

    Args:
        handles: Geometry, dtype and transfers.
        region: The staging buffer, still empty.
        link: Receives the measurements.
    """
    for slots in LINK_SLOTS:
        room = handles.host.fits(handles.host.swapped_bytes(slots))
        lease = region.take(slots) if room and slots <= region.free else None
        if lease is None:
            continue
        try:
            _time_copies(handles, lease, link)
        except TransferError as error:
            # Prefetches meet the same fault; they or their requests are retried.
            logger.error("VeriCache: the link could not be timed: %s", error)
        region.give(lease)


def _time_copies(handles: KVHandles, lease: Lease, link: LinkEstimate) -> None:
    host, pool = handles.host, handles.pool
    image = RawResidual(handles.geometry, lease.slots, 0, host.dtype, host.page_pool)
    blocks = (
        tuple(each.new_zeros(image.slots, *each.shape[1:]) for each in (keys, values))
        for keys, values in zip(pool.k_buffer, pool.v_buffer, strict=True)
    )
    try:
        saved = handles.transfers.save(blocks, image)
        _wait(saved)
        link.observe(saved.nbytes, saved.seconds, "out")
        staged = handles.transfers.start(image, lease, None)
        _wait(staged)
        link.observe(staged.nbytes, staged.seconds, "in")
    finally:
        image.free()


def _wait(transfer: Transfer) -> None:
    while not transfer.done():
        time.sleep(1e-3)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Time ``run`` on its device; the host synchronises once.

    Args:
        run: Launches the same work on every call.
        device: The device that executes it.

    Returns:
        Seconds per run: the least of ``REPEATS`` runs on a CPU, their mean between
        two events on a GPU, where the host's time to launch them does not count.
    """
    if device.type == "cpu":
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return min(times)
    run()  # compiles kernels, fills caches
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(PAUSE_CYCLES)
    first.record()
    for _ in range(REPEATS):
        run()
    last.record()
    last.synchronize()
    elapsed_ms: float = first.elapsed_time(last)
    return 1e-3 * elapsed_ms / REPEATS


def starting_coefficients(
    pool: Any, layers: Sequence[Any], draft_length: int
) -> Coefficients:
    """Time attention over the KV pool with one query and with a verification's.

    The cost per token outside attention and the base cost of an iteration are learned
    while serving. The cost per slot determines what drafting saves, so it must be
    known before.

    Args:
        pool: The KV pool; only read.
        layers: The model's ``RadixAttention`` layers.
        draft_length: Most draft tokens of a draft-verify cycle.

    Returns:
        Seconds per unit of work over all layers; ``START_COEFFICIENTS`` where the pool
        is too small to measure, or a longer row takes no longer.
    """
    kv = pool.k_buffer[0], pool.v_buffer[0]
    long = min(LONG, len(kv[0]))
    if long < 2 * SHORT:
        return START_COEFFICIENTS
    most = draft_length + 1

    def seconds(queries: int, slots: int) -> float:
        rows, attend = _attend(kv, layers[0], queries, most, slots)
        return seconds_of(attend, kv[0].device) / rows

    def slot_s(queries: int) -> float:
        """Return the seconds one more slot costs a row with so many queries."""
        return (seconds(queries, long) - seconds(queries, SHORT)) / (long - SHORT)

    one, many = slot_s(1), slot_s(most)
    if one <= 0:
        logger.warning("VeriCache: attention could not be timed: %.3g s a slot", one)
        return START_COEFFICIENTS
    product = max(LEAST_S, (many - one) / max(1, draft_length))
    read = max(LEAST_S, one - product)
    return Coefficients(
        START_COEFFICIENTS.base_s,
        START_COEFFICIENTS.per_token_s,
        read * len(layers),
        product * len(layers),
    )


def _attend(
    kv: tuple[torch.Tensor, torch.Tensor],
    layer: Any,
    queries: int,
    most_queries: int,
    slots: int,
) -> tuple[int, Callable[[], object]]:
    """Return the number of rows of ``slots`` slots, and a call that attends them."""
    keys, device = kv[0], kv[0].device
    count = 1 if device.type == "cpu" else TIMED_ROWS
    shape = (count * queries, layer.tp_q_head_num, layer.head_dim)
    q = torch.zeros(shape, dtype=keys.dtype, device=device)
    if device.type == "cpu":
        return count, lambda: run_attention(q, *kv, [(0, slots)], layer.scaling)
    listed = torch.arange(count * slots, device=device) % len(keys)
    row = torch.arange(count + 1, device=device)
    ends = torch.full_like(row[:-1], slots)
    table = listed.to(torch.int32).view(count, slots)
    rows = RaggedRows(table, row[:-1], row * queries, torch.zeros_like(ends), ends)
    return count, lambda: ragged_attention(
        q, kv, rows, layer.scaling, most_queries=most_queries
    )
