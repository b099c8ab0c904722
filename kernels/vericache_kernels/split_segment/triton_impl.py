"""Triton kernel of ``split_segment`` and ``join_segment``: one program per tile.

A program copies the keys and values of TILE entries of one head, so indices are read
once for both. Lanes run along D: a head's entry is contiguous in the pool and is read
and written in pieces of 16 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from vericache_kernels.split_segment.ref import as_integers

if TYPE_CHECKING:
    import torch

    from vericache_kernels.split_segment.cut import Cut, Pair

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


@triton.jit(do_not_specialize=["kept_count", "rest_count"])
def move_kernel(
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    slots: tl.tensor,
    kept: tl.tensor,
    rest: tl.tensor,
    listed: tl.tensor,
    k_kept: tl.tensor,
    v_kept: tl.tensor,
    k_block: tl.tensor,
    v_block: tl.tensor,
    kept_count: tl.tensor,
    rest_count: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    k_kept_slot_stride: tl.tensor,
    k_kept_head_stride: tl.tensor,
    v_kept_slot_stride: tl.tensor,
    v_kept_head_stride: tl.tensor,
    LISTED: tl.constexpr,
    JOIN: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WIDTH_K: tl.constexpr,
    WIDTH_V: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Copy the kept entries, then the others; grid (tiles of both, H).

    Kept entry i of head h is at pool slot ``slots[kept[h, i]]`` and, in ``k_kept`` and
    ``v_kept``, at row ``listed[i]`` if LISTED, else at row i. Other entry i is at pool
    slot ``slots[rest[h, i]]`` and at row i of ``k_block`` and ``v_block``
    [rest_count, H, D].
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    kept_tiles = tl.cdiv(kept_count, TILE)
    if tile < kept_tiles:
        entry = tile * TILE + tl.arange(0, TILE)
        there = entry < kept_count
        at = kept + head.to(tl.int64) * kept_count + entry
        token = tl.load(at, mask=there, other=0).to(tl.int64)
        slot = tl.load(slots + token, mask=there, other=0)
        row = entry.to(tl.int64)
        if LISTED:
            row = tl.load(listed + entry, mask=there, other=0)
        copy_entries(
            k_pool,
            k_kept,
            slot * k_slot_stride + head * k_head_stride,
            row * k_kept_slot_stride + head * k_kept_head_stride,
            *(there, WIDTH_K, DK, JOIN),
        )
        copy_entries(
            v_pool,
            v_kept,
            slot * v_slot_stride + head * v_head_stride,
            row * v_kept_slot_stride + head * v_kept_head_stride,
            *(there, WIDTH_V, DV, JOIN),
        )
    else:
        entry = (tile - kept_tiles) * TILE + tl.arange(0, TILE)
        there = entry < rest_count
        at = rest + head.to(tl.int64) * rest_count + entry
        token = tl.load(at, mask=there, other=0).to(tl.int64)
        slot = tl.load(slots + token, mask=there, other=0)
        row = entry.to(tl.int64) * H + head
        copy_entries(
            k_pool,
            k_block,
            slot * k_slot_stride + head * k_head_stride,
            row * DK,
            *(there, WIDTH_K, DK, JOIN),
        )
        copy_entries(
            v_pool,
            v_block,
            slot * v_slot_stride + head * v_head_stride,
            row * DV,
            *(there, WIDTH_V, DV, JOIN),
        )


def constants(heads: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    """Return the compile-time arguments of ``move_kernel`` except LISTED and JOIN.

    Args:
        heads: H.
        key_dim: D.
        value_dim: Dv.
    """
    widths = [triton.next_power_of_2(dim) for dim in (key_dim, value_dim)]
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


def launch_split(
    pool: Pair, cut: Cut, target: torch.Tensor, block: Pair, *, in_place: bool
) -> None:
    """See ``split_segment``; the arguments are validated."""
    if not in_place:
        _launch(pool, cut, target, pool, block, join=False)
        return
    waiting = _like(pool, len(target))
    _launch(pool, cut, None, waiting, block, join=False)
    for side, kept in zip(pool, waiting, strict=True):
        as_integers(side).index_copy_(0, target, as_integers(kept))


def launch_join(
    pool: Pair, cut: Cut, source: torch.Tensor, block: Pair, *, in_place: bool
) -> None:
    """See ``join_segment``; the arguments are validated."""
    if not in_place:
        _launch(pool, cut, source, pool, block, join=True)
        return
    keys, values = (as_integers(side).index_select(0, source) for side in pool)
    _launch(pool, cut, None, (keys, values), block, join=True)


def _like(pool: Pair, count: int) -> Pair:
    """Return uninitialised K and V for ``count`` slots, dtype of the pool."""
    keys, values = (side.new_empty(count, *side.shape[1:]) for side in pool)
    return keys, values


def _launch(
    pool: Pair,
    cut: Cut,
    listed: torch.Tensor | None,
    kept: Pair,
    block: Pair,
    *,
    join: bool,
) -> None:
    """Run the kernel; with ``listed`` None entry i is row i of ``kept``."""
    heads, kept_count = cut.kept.shape
    rest_count = cut.rest.shape[1]
    fixed = constants(heads, pool[0].shape[2], pool[1].shape[2])
    tile = fixed["TILE"]
    tiles = triton.cdiv(kept_count, tile) + triton.cdiv(rest_count, tile)
    if not tiles:
        return
    move_kernel[(tiles, heads)](
        *map(as_integers, pool),
        *(cut.slots, cut.kept, cut.rest),
        cut.slots if listed is None else listed,
        *map(as_integers, kept),
        *map(as_integers, block),
        *(kept_count, rest_count),
        *(stride for side in (*pool, *kept) for stride in side.stride()[:2]),
        LISTED=listed is not None,
        JOIN=join,
        **fixed,
        num_warps=NUM_WARPS,
    )
