"""Decode step of ``rotatekv``: reorders channels and inverts the rotation.

The rotation of values is linear, so it is inverted once on their weighted sum. That of
keys must be inverted per key, because RoPE is applied afterwards.
"""
# ruff: noqa: TID253, N803, N806, PLR0913

from __future__ import annotations

import triton
import triton.language as tl

from vericache_kernels.packed_attention.triton_bits import (
    hadamard_matrix,
    rotate_half,
    unpack_at,
    unpack_rows,
)


@triton.jit
def _affine(
    codes: tl.tensor,
    step_at: tl.tensor,
    zero_at: tl.tensor,
    group: tl.tensor,
    there: tl.tensor,
    KV: tl.constexpr,
) -> tl.tensor:
    """Return ``step * (code - zero)`` float32; ``group`` indexes step and zero."""
    steps = step_at.to(tl.pointer_type(KV), bitcast=True)
    zeros = zero_at.to(tl.pointer_type(tl.int16), bitcast=True)
    step = tl.load(steps + group, mask=there, other=0).to(tl.float32)
    zero = tl.load(zeros + group, mask=there, other=0).to(tl.int32)
    return (codes - zero).to(tl.float32) * step


@triton.jit
def rotatekv_keys(
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
    """Decode keys [TILE, D]; see ``triton_impl`` for the arguments.

    The Hadamard matrix of size R * D is the Kronecker product of those of R and D, so
    the rotated heads are summed with signs, then multiplied by the matrix of size D.
    """
    BITS: tl.constexpr = STEP[0]
    GROUP: tl.constexpr = STEP[1]
    ROTATED: tl.constexpr = STEP[2]
    token = start + tl.arange(0, TILE)
    there = (token < tokens)[:, None]
    row = token.to(tl.int64)[:, None]
    base = key_bytes + tl.multiple_of(tl.load(offsets), 16)
    codes_at = base + row * (H * D * BITS // 8)
    step_at = key_bytes + tl.multiple_of(tl.load(offsets + 1), 16)
    zero_at = key_bytes + tl.multiple_of(tl.load(offsets + 2), 16)
    mixed = tl.zeros([TILE, D], tl.float32)
    for other in range(ROTATED):
        channel = ((head // ROTATED) * ROTATED + other) * D + tl.arange(0, D)
        place = tl.load(order + channel)[None, :]
        there_all = there & (place >= 0)
        codes = unpack_at(codes_at, place, there_all, BITS)
        group = row * (H * D // GROUP) + place // GROUP
        tile = _affine(codes, step_at, zero_at, group, there_all, KV)
        ones = other & (head % ROTATED)
        ones ^= ones >> 4
        ones ^= ones >> 2
        ones ^= ones >> 1
        mixed += tile * (1 - 2 * (ones & 1)).to(tl.float32)
    matrix = hadamard_matrix(D).to(PRODUCT)
    keys = tl.dot(mixed.to(PRODUCT), matrix, input_precision="ieee")
    keys *= (ROTATED * D) ** -0.5
    where = tl.load(places + token, mask=token < tokens, other=0)
    return rotate_half(keys, where, rope, token < tokens, D).to(KV)


@triton.jit
def rotatekv_values(
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
    """Decode values [TILE, D], still rotated; see ``triton_impl``."""
    BITS: tl.constexpr = STEP[0]
    GROUP: tl.constexpr = STEP[1]
    token = start + tl.arange(0, TILE)
    there = token < tokens
    row = token.to(tl.int64)
    base = value_bytes + tl.multiple_of(tl.load(offsets + 3), 16)
    base += head * (D * BITS // 8)
    codes = unpack_rows(base, row * (H * D * BITS // 8), there, BITS, D)
    step_at = value_bytes + tl.multiple_of(tl.load(offsets + 4), 16)
    zero_at = value_bytes + tl.multiple_of(tl.load(offsets + 5), 16)
    channel = head * D + tl.arange(0, D)
    group = row[:, None] * (H * D // GROUP) + (channel // GROUP)[None, :]
    return _affine(codes, step_at, zero_at, group, there[:, None], KV).to(KV)


@triton.jit
def rotatekv_finish(
    acc: tl.tensor,
    mass: tl.tensor,
    PRODUCT: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Invert the rotation on the weighted sum of values [M, D] with ``mass`` [M]."""
    matrix = hadamard_matrix(D).to(PRODUCT)
    # The mean is within the range of values, so unlike the sum it fits float16.
    mean = (acc / tl.where(mass > 0, mass, 1.0)[:, None]).to(PRODUCT)
    turned = tl.dot(mean, matrix, input_precision="ieee")
    return turned * (mass * D**-0.5)[:, None]
