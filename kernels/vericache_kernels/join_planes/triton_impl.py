"""Triton kernels of ``join_planes``: count escapes, then restore one tile per program.

The residual lists the exponents of escaped numbers in one row, keys first, head after
head. The index of an exponent is the number of escapes before it, so the first kernel
counts escapes per tile and the second sums the tiles before its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from vericache_kernels.join_planes.planes import FORMATS
from vericache_kernels.packed_attention.triton_bits import unpack_at, unpack_rows

if TYPE_CHECKING:
    import torch

    from vericache_kernels.join_planes.planes import DraftPlanes, PlaneTarget, Residuals
    from vericache_kernels.packed_attention.steps import SplitPlanesStep

COUNT_WARPS = 4
JOIN_WARPS = 8
JOIN_REGISTERS = 128
"""Maximum registers per thread: 2 programs of 8 warps per multiprocessor, no spills."""


@triton.jit
def _field(source: tl.tensor, offset: tl.tensor) -> tl.tensor:
    """Return a pointer to a field; the value at ``offset`` is a multiple of 16."""
    return source + tl.multiple_of(tl.load(offset), 16)


@triton.jit
def _read_codes(
    source: tl.tensor,
    offset: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    BITS: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Read the rows of ``token`` from a field of [H, t] rows: [TILE, D] int32."""
    rows = (head * tokens + token).to(tl.int64) * (D * BITS // 8)
    return unpack_rows(_field(source, offset), rows, token < tokens, BITS, D)


@triton.jit
def _escapes(
    codes: tl.tensor, there: tl.tensor, E: tl.constexpr, M: tl.constexpr
) -> tl.tensor:
    """Return 1 where a code is an escape (exponent in the residual), else 0."""
    none = (codes >> M) & ((1 << E) - 1) == (1 << E) - 1
    return (none & there[:, None]).to(tl.int32)


@triton.jit
def count_kernel(
    key_bytes: tl.tensor,
    value_bytes: tl.tensor,
    offsets: tl.tensor,
    segment_tokens: tl.tensor,
    counts: tl.tensor,
    E: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Count the escapes of a tile.

    Grid (S, H * TILES), ``counts`` [S, 2, H * TILES] int32.
    """
    BITS: tl.constexpr = 1 + E + M  # noqa: N806
    segment, lane = tl.program_id(0), tl.program_id(1)
    head, start = lane // TILES, lane % TILES * TILE
    tokens = tl.load(segment_tokens + segment)
    token = start + tl.arange(0, TILE)
    field = offsets + segment * 4
    codes = _read_codes(key_bytes, field, head, token, tokens, BITS, DK)
    keys = tl.sum(tl.sum(_escapes(codes, token < tokens, E, M), 1), 0)
    codes = _read_codes(value_bytes, field + 2, head, token, tokens, BITS, DV)
    values = tl.sum(tl.sum(_escapes(codes, token < tokens, E, M), 1), 0)
    at = counts + segment * (2 * H * TILES) + lane
    tl.store(at, keys)
    tl.store(at + H * TILES, values)


@triton.jit
def _join_tile(
    codes: tl.tensor,
    shared: tl.tensor,
    before: tl.tensor,
    listed: tl.tensor,
    ends: tl.tensor,
    low_at: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    E: tl.constexpr,
    M: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Assemble the bits of [TILE, D] numbers, int32.

    Args:
        codes: [TILE, D] int32.
        shared: Shared exponents, broadcastable to ``codes``, int32.
        before: Escapes of the segment before this tile.
        listed: Pointer to the residual's exponents.
        ends: Number of listed exponents.
        low_at: Pointer to the residual's low mantissa bits, a multiple of 16.
        head: KV head of the tile.
        token: [TILE] int32, token indices.
        tokens: Tokens of the segment.
        E: Exponent bits of a code.
        M: Mantissa bits of a code.
        EXPONENT: Exponent bits of a number.
        MANTISSA: Mantissa bits of a number.
        D: Numbers of an entry.
    """
    REST: tl.constexpr = MANTISSA - M  # noqa: N806
    PLANES: tl.constexpr = REST // 8  # noqa: N806
    there = token < tokens
    escaped = _escapes(codes, there, E, M)
    in_row = tl.cumsum(escaped, 1)
    of_row = tl.sum(escaped, 1)
    row_before = before + tl.cumsum(of_row, 0) - of_row
    rank = row_before[:, None] + in_row - escaped
    known = (escaped != 0) & (rank < ends)
    exponent = shared - ((codes >> M) & ((1 << E) - 1))
    found = unpack_at(listed, rank, known, EXPONENT)
    exponent = tl.where(escaped != 0, found, exponent)
    bits = (codes >> (E + M)) << (EXPONENT + MANTISSA)
    bits |= exponent << MANTISSA
    bits |= (codes & ((1 << M) - 1)) << REST
    row = (head * tokens + token).to(tl.int64) * (D * REST // 8)
    lane = tl.arange(0, D)
    for plane in tl.static_range(PLANES):
        at = low_at + row[:, None] + (plane * D + lane)[None, :]
        whole = tl.load(at, mask=there[:, None], other=0).to(tl.int32)
        bits |= whole << (8 * plane)
    if REST % 8 != 0:
        top = unpack_rows(low_at, row + PLANES * D, there, REST % 8, D)
        bits |= top << (8 * PLANES)
    return bits


@triton.jit
def _write(
    buffer: tl.tensor,
    bits: tl.tensor,
    row: tl.tensor,
    there: tl.tensor,
    D: tl.constexpr,
) -> None:
    """Store [TILE, D] numbers, each entry at its ``row`` [TILE] int64 in the buffer."""
    at = buffer + row[:, None] + tl.arange(0, D)[None, :]
    tl.store(at, bits.to(buffer.dtype.element_ty), mask=there[:, None])


@triton.jit(do_not_specialize=["columns"])
def join_kernel(
    key_bytes: tl.tensor,
    value_bytes: tl.tensor,
    offsets: tl.tensor,
    segment_tokens: tl.tensor,
    plane_bytes: tl.tensor,
    plane_offsets: tl.tensor,
    escapes: tl.tensor,
    counts: tl.tensor,
    found: tl.tensor,
    slots: tl.tensor,
    places: tl.tensor,
    first: tl.tensor,
    k_buffer: tl.tensor,
    v_buffer: tl.tensor,
    columns: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    E: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    H: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    COUNTS: tl.constexpr,
) -> None:
    """Restore a tile of keys and values and write it; grid (S, H * TILES).

    ``counts`` comes from ``count_kernel``; COUNTS is 2 * H * TILES rounded up to a
    power of two. ``found`` [S] gets the escapes of each segment.
    """
    BITS: tl.constexpr = 1 + E + M  # noqa: N806
    segment, lane = tl.program_id(0), tl.program_id(1)
    head, start = lane // TILES, lane % TILES * TILE
    tokens = tl.load(segment_tokens + segment)
    ends = tl.load(escapes + segment)
    place = tl.arange(0, COUNTS)
    counted = place < 2 * H * TILES
    own = counts + segment * (2 * H * TILES)
    count = tl.load(own + place, mask=counted, other=0)
    if lane == 0:
        tl.store(found + segment, tl.sum(count, 0))
    before_keys = tl.sum(tl.where(place < lane, count, 0), 0)
    before_values = tl.sum(tl.where(place < H * TILES + lane, count, 0), 0)

    token = start + tl.arange(0, TILE)
    there = token < tokens
    column = tl.load(first + segment).to(tl.int64) + token
    at = places + head.to(tl.int64) * columns + column
    index = tl.load(at, mask=there, other=0).to(tl.int64)
    slot = tl.load(slots + index, mask=there, other=0)
    planes = plane_offsets + segment * 3
    listed = _field(plane_bytes, planes + 2)
    field = offsets + segment * 4

    codes = _read_codes(key_bytes, field, head, token, tokens, BITS, DK)
    # A tile is inside one block of tokens, so its keys share a row of exponents.
    one = start + tl.arange(0, 1)
    row = (head * tl.cdiv(tokens, BLOCK) + one // BLOCK).to(tl.int64)
    base = _field(key_bytes, field + 1)
    shared = unpack_rows(base, row * (DK * EXPONENT // 8), one < tokens, EXPONENT, DK)
    bits = _join_tile(
        *(codes, shared, before_keys, listed, ends, _field(plane_bytes, planes)),
        *(head, token, tokens, E, M, EXPONENT, MANTISSA, DK),
    )
    _write(k_buffer, bits, slot * k_slot_stride + head * k_head_stride, there, DK)

    codes = _read_codes(value_bytes, field + 2, head, token, tokens, BITS, DV)
    base = _field(value_bytes, field + 3)
    base += head.to(tl.int64) * tl.cdiv(tokens * EXPONENT, 8)
    shared = unpack_at(base, token, there, EXPONENT)[:, None]
    bits = _join_tile(
        *(codes, shared, before_values, listed, ends, _field(plane_bytes, planes + 1)),
        *(head, token, tokens, E, M, EXPONENT, MANTISSA, DV),
    )
    _write(v_buffer, bits, slot * v_slot_stride + head * v_head_stride, there, DV)


def constants(
    step: SplitPlanesStep, heads: int, dims: tuple[int, int], most_tokens: int
) -> dict[str, Any]:
    """Return the compile-time arguments of both kernels.

    Args:
        step: Decode step of the codec.
        heads: H.
        dims: D of keys and of values.
        most_tokens: Maximum tokens of a segment.
    """
    return {
        "E": step.exponent_bits,
        "M": step.mantissa_bits,
        "H": heads,
        "DK": dims[0],
        "DV": dims[1],
        "TILE": step.tile,
        "TILES": triton.cdiv(most_tokens, step.tile),
    }


def join_constants(step: SplitPlanesStep, dtype: torch.dtype, tiles: int) -> Any:
    """Return the further compile-time arguments of ``join_kernel``.

    Args:
        step: Decode step of the codec.
        dtype: Dtype of the KV.
        tiles: H * TILES.
    """
    form = FORMATS[dtype]
    return {
        "BLOCK": step.block,
        "EXPONENT": form.exponent,
        "MANTISSA": form.mantissa,
        "COUNTS": triton.next_power_of_2(2 * tiles),
    }


def launch(
    draft: DraftPlanes, residual: Residuals, step: SplitPlanesStep, target: PlaneTarget
) -> torch.Tensor:
    """See ``join_planes``; the arguments are validated."""
    segments, heads = len(draft.tokens), target.places.shape[0]
    dims = (target.k_buffer.shape[2], target.v_buffer.shape[2])
    fixed = constants(step, heads, dims, target.most_tokens)
    tiles = heads * fixed["TILES"]
    counts = draft.tokens.new_empty(segments, 2, tiles)
    found = draft.tokens.new_empty(segments)
    if not segments:
        return found
    planes = (draft.key_bytes, draft.value_bytes, draft.offsets, draft.tokens)
    count_kernel[(segments, tiles)](*planes, counts, **fixed, num_warps=COUNT_WARPS)
    integer = FORMATS[target.k_buffer.dtype].integer
    join_kernel[(segments, tiles)](
        *planes,
        *(residual.plane_bytes, residual.offsets, residual.escapes, counts, found),
        *(target.slots, target.places, target.first),
        *(target.k_buffer.view(integer), target.v_buffer.view(integer)),
        target.places.stride(0),
        *target.k_buffer.stride()[:2],
        *target.v_buffer.stride()[:2],
        **fixed,
        **join_constants(step, target.k_buffer.dtype, tiles),
        num_warps=JOIN_WARPS,
        maxnreg=JOIN_REGISTERS,
    )
    return found
