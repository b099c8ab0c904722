"""Triton kernel of ``pick_entries`` and ``put_entries``: one program per head tile.

A program copies the keys and values of TILE entries of one head, so indices are read
once for both. Lanes run along D: a head's entry is contiguous in the pool and is read
and written in pieces of 16 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from vericache_kernels.head_entries.ref import as_integers

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

MOST_TILE = 32
"""Maximum entries per program: at D = 128 and 2 bytes, 4 x 16 bytes per thread."""
TILE_ELEMENTS = 8192
"""Maximum elements of a tile; wider heads get fewer entries."""
NUM_WARPS = 4


@triton.jit
def copy_entries(
    pool: tl.tensor,
    other: tl.tensor,
    pool_row: tl.tensor,
    other_row: tl.tensor,
    there: tl.tensor,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    JOIN: tl.constexpr,
) -> None:
    """Copy [TILE, D] from the pool, or to it.

    Args:
        pool: Pointer to integers.
        other: As ``pool``.
        pool_row: [TILE] int64, offset of each entry in ``pool``.
        other_row: [TILE] int64, offset of each entry in ``other``.
        there: [TILE] bool mask; False: neither read nor written.
        WIDTH: D rounded up to a power of two.
        D: Elements of an entry.
        JOIN: Copy to the pool.
    """
    lane = tl.arange(0, WIDTH)
    inside = there[:, None] & (lane < D)[None, :]
    in_pool = pool + pool_row[:, None] + lane[None, :]
    outside = other + other_row[:, None] + lane[None, :]
    if JOIN:
        tl.store(in_pool, tl.load(outside, mask=inside), mask=inside)
    else:
        tl.store(outside, tl.load(in_pool, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["count"])
def entries_kernel(
    k_layer: tl.tensor,
    v_layer: tl.tensor,
    slots: tl.tensor,
    index: tl.tensor,
    k_rows: tl.tensor,
    v_rows: tl.tensor,
    count: tl.tensor,
    k_entry_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_entry_stride: tl.tensor,
    v_head_stride: tl.tensor,
    MAPPED: tl.constexpr,
    PUT: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Copy TILE entries of one head, keys and values; grid (tiles, H).

    DV is 0 for a single tensor; ``slots`` is read if MAPPED.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tile * TILE + tl.arange(0, TILE)
    there = row < count
    at = index + head.to(tl.int64) * count + row
    entry = tl.load(at, mask=there, other=0).to(tl.int64)
    if MAPPED:
        entry = tl.load(slots + entry, mask=there, other=0)
    own = row.to(tl.int64) * H + head
    copy_entries(
        k_layer,
        k_rows,
        entry * k_entry_stride + head * k_head_stride,
        own * DK,
        *(there, WIDTH_K, DK, PUT),
    )
    if DV:
        copy_entries(
            v_layer,
            v_rows,
            entry * v_entry_stride + head * v_head_stride,
            own * DV,
            *(there, WIDTH_V, DV, PUT),
        )


def constants(heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Return the kernel's compile-time arguments except MAPPED and PUT.

    Args:
        heads: H.
        key_dim: D.
        value_dim: Dv; 0 for a single tensor.
    """
    widths = [triton.next_power_of_2(max(1, dim)) for dim in (key_dim, value_dim)]
    return {
        "H": heads,
        "DK": key_dim,
        "DV": value_dim,
        "WIDTH_K": widths[0],
        "WIDTH_V": widths[1],
        "TILE": tile_of(max(widths)),
    }


def tile_of(width: int) -> int:
    """Return the entries per program.

    Args:
        width: Elements of an entry, a power of two.
    """
    return min(MOST_TILE, max(1, TILE_ELEMENTS // width))


def launch(
    layer: Sequence[torch.Tensor],
    index: torch.Tensor,
    rows: Sequence[torch.Tensor],
    slots: torch.Tensor | None,
    *,
    put: bool,
) -> None:
    """See ``pick_entries`` and ``put_entries``; the arguments are validated."""
    heads, count = index.shape
    if not index.numel():
        return
    value_dim = layer[1].shape[2] if len(layer) > 1 else 0
    fixed = constants(heads, layer[0].shape[2], value_dim)
    # Unused pointers (second tensor, slots) are not dereferenced.
    sides, parts = (map(as_integers, (each[0], each[-1])) for each in (layer, rows))
    entries_kernel[(triton.cdiv(count, fixed["TILE"]), heads)](
        *(*sides, index if slots is None else slots, index, *parts, count),
        *(stride for side in (layer[0], layer[-1]) for stride in side.stride()[:2]),
        MAPPED=slots is not None,
        PUT=put,
        **fixed,
        num_warps=NUM_WARPS,
    )
