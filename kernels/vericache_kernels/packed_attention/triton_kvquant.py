"""Decode step of ``kvquant``: scaled codebook entries, exact numbers, then RoPE."""
# ruff: noqa: TID253, N803, N806, PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from vericache_kernels.packed_attention.triton_bits import rotate_half, unpack_rows


@triton.jit
def _with_exact(
    tile: tl.tensor,
    columns_at: tl.tensor,
    exact_at: tl.tensor,
    row: tl.tensor,
    there: tl.tensor,
    head: tl.tensor,
    STEP: tl.constexpr,
    KV: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Write the exactly stored numbers into one head's tile [T, D] float32."""
    PLACES: tl.constexpr = STEP[1]
    COLUMN: tl.constexpr = tl.uint8 if H * D <= 256 else tl.uint16
    columns = columns_at.to(tl.pointer_type(COLUMN), bitcast=True)
    exact = exact_at.to(tl.pointer_type(KV), bitcast=True)
    own = head * D + tl.arange(0, D)
    for place in range(PLACES):
        column = tl.load(columns + row * PLACES + place, mask=there, other=0)
        number = tl.load(exact + row * PLACES + place, mask=there, other=0)
        hit = column.to(tl.int32)[:, None] == own[None, :]
        tile = tl.where(hit, number.to(tl.float32)[:, None], tile)
    return tile


@triton.jit
def kvquant_keys(
    key_bytes: tl.tensor,
    offsets: tl.tensor,
    head: tl.tensor,
    start: tl.tensor,
    tokens: tl.tensor,
    places: tl.tensor,
    tables: tl.tensor,
    order: tl.tensor,
    rope: tl.tensor,
    STEP: tl.constexpr,
    KV: tl.constexpr,
    PRODUCT: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Decode keys [TILE, D]; see ``triton_impl`` for the arguments."""
    BITS: tl.constexpr = STEP[0]
    token = start + tl.arange(0, TILE)
    there = token < tokens
    row = token.to(tl.int64)
    base = key_bytes + tl.multiple_of(tl.load(offsets), 16)
    base += head * (D * BITS // 8)
    codes = unpack_rows(base, row * (H * D * BITS // 8), there, BITS, D)
    channel = head * D + tl.arange(0, D)
    offset = tl.load(tables + channel)
    reach = tl.load(tables + H * D + channel)
    keys = tl.load(tables + 2 * H * D + codes) * reach[None, :] + offset[None, :]
    columns = key_bytes + tl.multiple_of(tl.load(offsets + 1), 16)
    exact = key_bytes + tl.multiple_of(tl.load(offsets + 2), 16)
    keys = _with_exact(keys, columns, exact, row, there, head, STEP, KV, H, D)
    where = tl.load(places + token, mask=there, other=0)
    return rotate_half(keys, where, rope, there, D).to(KV)


@triton.jit
def kvquant_values(
    value_bytes: tl.tensor,
    offsets: tl.tensor,
    head: tl.tensor,
    start: tl.tensor,
    tokens: tl.tensor,
    tables: tl.tensor,
    STEP: tl.constexpr,
    KV: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Decode values [TILE, D]; see ``triton_impl`` for the arguments."""
    BITS: tl.constexpr = STEP[0]
    token = start + tl.arange(0, TILE)
    there = token < tokens
    row = token.to(tl.int64)
    base = value_bytes + tl.multiple_of(tl.load(offsets + 3), 16)
    base += head * (D * BITS // 8)
    codes = unpack_rows(base, row * (H * D * BITS // 8), there, BITS, D)
    at = value_bytes + tl.multiple_of(tl.load(offsets + 6), 16)
    offset = tl.load(at.to(tl.pointer_type(KV), bitcast=True) + row, there, other=0)
    at = value_bytes + tl.multiple_of(tl.load(offsets + 7), 16)
    reach = tl.load(at.to(tl.pointer_type(KV), bitcast=True) + row, there, other=0)
    values = tl.load(tables + 2 * H * D + (1 << BITS) + codes)
    values = values * reach.to(tl.float32)[:, None] + offset.to(tl.float32)[:, None]
    columns = value_bytes + tl.multiple_of(tl.load(offsets + 4), 16)
    exact = value_bytes + tl.multiple_of(tl.load(offsets + 5), 16)
    return _with_exact(values, columns, exact, row, there, head, STEP, KV, H, D).to(KV)
