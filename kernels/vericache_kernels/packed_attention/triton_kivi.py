"""Decode step of ``kivi``: code times the group's step plus its minimum."""
# ruff: noqa: TID253, N803, N806, PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from vericache_kernels.packed_attention.triton_bits import unpack_rows


@triton.jit
def kivi_keys(
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
    GROUP: tl.constexpr = STEP[1]
    token = start + tl.arange(0, TILE)
    base = key_bytes + tl.multiple_of(tl.load(offsets), 16)
    rows = (head * tokens + token).to(tl.int64) * (D * BITS // 8)
    codes = unpack_rows(base, rows, token < tokens, BITS, D)
    # All tokens of the tile belong to one group.
    group = (head * tokens + start) // GROUP
    channel = group.to(tl.int64) * D + tl.arange(0, D)
    base = key_bytes + tl.multiple_of(tl.load(offsets + 1), 16)
    step = tl.load(base.to(tl.pointer_type(KV), bitcast=True) + channel)
    base = key_bytes + tl.multiple_of(tl.load(offsets + 2), 16)
    least = tl.load(base.to(tl.pointer_type(KV), bitcast=True) + channel)
    scaled = codes.to(tl.float32) * step.to(tl.float32)[None, :]
    return (scaled + least.to(tl.float32)[None, :]).to(KV)


@triton.jit
def kivi_values(
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
    GROUP: tl.constexpr = STEP[1]
    GROUPS: tl.constexpr = D // GROUP
    token = start + tl.arange(0, TILE)
    there = token < tokens
    row = (head * tokens + token).to(tl.int64)
    base = value_bytes + tl.multiple_of(tl.load(offsets + 3), 16)
    codes = unpack_rows(base, row * (D * BITS // 8), there, BITS, D)
    group = row[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    base = value_bytes + tl.multiple_of(tl.load(offsets + 4), 16)
    source = base.to(tl.pointer_type(KV), bitcast=True) + group
    step = tl.load(source, mask=there[:, None], other=0).to(tl.float32)
    base = value_bytes + tl.multiple_of(tl.load(offsets + 5), 16)
    source = base.to(tl.pointer_type(KV), bitcast=True) + group
    least = tl.load(source, mask=there[:, None], other=0).to(tl.float32)
    grouped = tl.reshape(codes.to(tl.float32), (TILE, GROUPS, GROUP))
    grouped = grouped * step[:, :, None] + least[:, :, None]
    return tl.reshape(grouped, (TILE, D)).to(KV)
