"""First guesses of what an iteration costs, timed at boot on the machine itself."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from vericache_kernels.run_attention import run_attention
from vericache_sglang.errors import TransferError
from vericache_sglang.memory.complement import RawComplement
from vericache_sglang.scheduling.estimates import START_COEFFICIENTS
from vericache_sglang.scheduling.iteration_model import Coefficients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.engine.places import Places
    from vericache_sglang.memory.staging import Lease, StagingRegion
    from vericache_sglang.memory.transfers import Transfer
    from vericache_sglang.scheduling.link import LinkEstimate

logger = logging.getLogger(__name__)

SHORT, LONG = 256, 4096
"""Row lengths timed, in slots."""

LINK_SLOTS = (32, 2048)
"""Slots of the copies that time the link."""

REPEATS = 5
LEAST_S = 1e-13


def measure_link(places: Places, region: StagingRegion, link: LinkEstimate) -> None:
    """Time a small and a large copy each way: the first decision needs to know.

    Args:
        places: Geometry, dtype and transfers.
        region: The staging region; nothing is staged yet.
        link: Takes both measurements.
    """
    for slots in LINK_SLOTS:
        lease = region.take(slots) if slots <= region.free else None
        if lease is None:
            continue
        try:
            _time_copies(places, lease, link)
        except TransferError as error:
            # Reloads meet the same fault and are made again, or their request is.
            logger.error("VeriCache: the link could not be timed: %s", error)
        region.give(lease)


def _time_copies(places: Places, lease: Lease, link: LinkEstimate) -> None:
    host, geometry = places.host, places.geometry
    image = RawComplement(geometry, lease.slots, 1, host.dtype)
    image.kept.zero_()
    blocks = (
        (torch.zeros_like(image.keys[layer]), torch.zeros_like(image.values[layer]))
        for layer in range(geometry.layers)
    )
    saved = places.transfers.save(blocks, image)
    _wait(saved)
    link.observe(saved.nbytes, saved.seconds, "out")
    staged = places.transfers.start(image, lease, lambda layer: [])
    _wait(staged)
    link.observe(staged.nbytes, staged.seconds, "in")


def _wait(transfer: Transfer) -> None:
    while not transfer.done():
        time.sleep(1e-3)


def starting_coefficients(
    pool: Any, layers: Sequence[Any], draft_length: int
) -> Coefficients:
    """Time attention over the KV pool with one query and with a round's queries.

    What a token costs outside attention, and an iteration's base, are learned while
    serving; the cost of a slot is what drafting saves, and must be known before.

    Args:
        pool: The KV pool; only read.
        layers: The model's ``RadixAttention`` layers.
        draft_length: Most drafts of a round.

    Returns:
        Seconds per unit of work over all layers; the assumed ones where the pool is on
        a GPU, or too small to tell.
    """
    keys, values = pool.k_buffer[0], pool.v_buffer[0]
    long = min(LONG, keys.shape[0])
    if keys.device.type != "cpu" or long < 2 * SHORT:
        return START_COEFFICIENTS
    layer = layers[0]

    def seconds(queries: int, slots: int) -> float:
        q = torch.zeros(queries, layer.tp_q_head_num, layer.head_dim, dtype=keys.dtype)
        times = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            run_attention(q, keys, values, [(0, slots)], layer.scaling)
            times.append(time.perf_counter() - began)
        return min(times)

    queries = draft_length + 1
    one = (seconds(1, long) - seconds(1, SHORT)) / (long - SHORT)
    many = (seconds(queries, long) - seconds(queries, SHORT)) / (long - SHORT)
    product = max(LEAST_S, (many - one) / max(1, queries - 1))
    read = max(LEAST_S, one - product)
    return Coefficients(
        START_COEFFICIENTS.base_s,
        START_COEFFICIENTS.per_token_s,
        read * len(layers),
        product * len(layers),
    )
