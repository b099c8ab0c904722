"""Decode step of ``split-planes``: assembles floats from integer fields."""
# ruff: noqa: TID253, N803, N806, PLR0913, SIM300

from __future__ import annotations

import triton
import triton.language as tl

from vericache_kernels.packed_attention.triton_bits import unpack_at, unpack_rows


@triton.jit
def _numbers(
    codes: tl.tensor,
    shared: tl.tensor,
    STEP: tl.constexpr,
    KV: tl.constexpr,
) -> tl.tensor:
    """Return the midpoint of the numbers with the same code, as the codec decodes it.

    Args:
        codes: [T, D] int32.
        shared: Shared exponents, broadcastable to ``codes``, int32.
        STEP: The step's parameters.
        KV: Dtype of the numbers.
    """
    E: tl.constexpr = STEP[0]
    M: tl.constexpr = STEP[1]
    MANTISSA: tl.constexpr = (
        7 if KV == tl.bfloat16 else (10 if KV == tl.float16 else 23)
    )
    EXPONENT: tl.constexpr = 5 if KV == tl.float16 else 8
    REST: tl.constexpr = MANTISSA - M
    distance = (codes >> M) & ((1 << E) - 1)
    kept = distance != (1 << E) - 1
    exponent = tl.where(kept, shared - distance, 0)
    mantissa = tl.where(kept, (codes & ((1 << M) - 1)) << REST, 0)
    # A normal number takes the midpoint of its code, a subnormal one its minimum.
    mantissa |= tl.where(exponent > 0, 1 << (REST - 1), 0)
    sign = (codes >> (E + M)) << (EXPONENT + MANTISSA)
    bits = sign | (exponent << MANTISSA) | mantissa
    INTEGER: tl.constexpr = tl.int32 if KV == tl.float32 else tl.int16
    return bits.to(INTEGER).to(KV, bitcast=True)


@triton.jit
def split_planes_keys(
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
    BITS: tl.constexpr = 1 + STEP[0] + STEP[1]
    BLOCK: tl.constexpr = STEP[2]
    token = start + tl.arange(0, TILE)
    there = token < tokens
    base = key_bytes + tl.multiple_of(tl.load(offsets), 16)
    rows = (head * tokens + token).to(tl.int64) * (D * BITS // 8)
    codes = unpack_rows(base, rows, there, BITS, D)
    WIDTH: tl.constexpr = 5 if KV == tl.float16 else 8
    block = head * tl.cdiv(tokens, BLOCK) + start // BLOCK
    base = key_bytes + tl.multiple_of(tl.load(offsets + 1), 16)
    row = (block + tl.arange(0, 1)).to(tl.int64) * (D * WIDTH // 8)
    shared = unpack_rows(base, row, row >= 0, WIDTH, D)
    return _numbers(codes, shared, STEP, KV)


@triton.jit
def split_planes_values(
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
    BITS: tl.constexpr = 1 + STEP[0] + STEP[1]
    token = start + tl.arange(0, TILE)
    there = token < tokens
    base = value_bytes + tl.multiple_of(tl.load(offsets + 2), 16)
    rows = (head * tokens + token).to(tl.int64) * (D * BITS // 8)
    codes = unpack_rows(base, rows, there, BITS, D)
    WIDTH: tl.constexpr = 5 if KV == tl.float16 else 8
    base = value_bytes + tl.multiple_of(tl.load(offsets + 3), 16)
    base += head.to(tl.int64) * tl.cdiv(tokens * WIDTH, 8)
    shared = unpack_at(base, token, there, WIDTH)
    return _numbers(codes, shared[:, None], STEP, KV)
