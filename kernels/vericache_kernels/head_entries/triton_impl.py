"""Triton kernel of ``pick_entries`` and ``put_entries``: one program per head tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from vericache_kernels.split_segment.ref import as_integers
from vericache_kernels.split_segment.triton_impl import copy_entries, tile_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

NUM_WARPS = 4


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
