"""Device functions shared by decode steps: unpacking codes and rotating keys."""
# Only ``triton_impl`` imports these files, on a machine that runs Triton.
# ruff: noqa: TID253, N803, N806

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack_rows(
    base: tl.tensor,
    rows: tl.tensor,
    there: tl.tensor,
    BITS: tl.constexpr,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """Read rows of packed codes, as ``codecs.packing.unpack`` does.

    Eight codes fill BITS bytes. They are loaded in the largest aligned pieces (1 byte
    for 3, 5, 7 bits, 2 for 2 and 6, 4 for 4), combined into one word and shifted, so
    that no byte is read twice.

    Args:
        base: Pointer to uint8, a multiple of 16.
        rows: [T] byte offsets, multiples of BITS.
        there: [T] mask; False: the row is not read, its codes are 0.
        BITS: Width of a code, 1 to 8.
        COUNT: Codes in a row, a power of two >= 8.

    Returns:
        [T, COUNT] int32.
    """
    T: tl.constexpr = rows.shape[0]
    if BITS == 8:
        column = tl.arange(0, COUNT)
        source = base + rows[:, None] + column[None, :]
        return tl.load(source, mask=there[:, None], other=0).to(tl.int32)
    UNIT: tl.constexpr = BITS & -BITS
    PIECE: tl.constexpr = (
        tl.uint8 if UNIT == 1 else (tl.uint16 if UNIT == 2 else tl.uint32)
    )
    WORD: tl.constexpr = tl.uint32 if BITS <= 4 else tl.uint64
    octet = tl.arange(0, COUNT // 8)
    pieces = base.to(tl.pointer_type(PIECE), bitcast=True)
    first = (rows // UNIT)[:, None] + octet[None, :] * (BITS // UNIT)
    word = tl.zeros([T, COUNT // 8], WORD)
    for piece in tl.static_range(BITS // UNIT):
        read = tl.load(pieces + first + piece, mask=there[:, None], other=0)
        word |= read.to(WORD) << (8 * UNIT * piece)
    place = (tl.arange(0, 8) * BITS).to(WORD)
    codes = (word[:, :, None] >> place[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(codes.to(tl.int32), (T, COUNT))


@triton.jit
def unpack_at(
    base: tl.tensor, places: tl.tensor, there: tl.tensor, BITS: tl.constexpr
) -> tl.tensor:
    """Read single codes of a packed row; a code may span two bytes.

    Args:
        base: Pointer to uint8, or tensor of pointers broadcastable to ``places``.
        places: Index of each code in its row, int32.
        there: bool mask, shape of ``places``; False: not read, 0.
        BITS: Width of a code, 1 to 8.

    Returns:
        int32 as ``places``.
    """
    bit = places * BITS
    byte = bit >> 3
    shift = bit & 7
    word = tl.load(base + byte, mask=there, other=0).to(tl.int32)
    if 8 % BITS != 0:
        over = there & (shift + BITS > 8)
        word |= tl.load(base + byte + 1, mask=over, other=0).to(tl.int32) << 8
    return (word >> shift) & ((1 << BITS) - 1)


@triton.jit
def rotate_half(
    keys: tl.tensor,
    positions: tl.tensor,
    rope: tl.tensor,
    there: tl.tensor,
    D: tl.constexpr,
) -> tl.tensor:
    """Apply rotate-half RoPE.

    Args:
        keys: [T, D] float32.
        positions: [T] int32.
        rope: Pointer to float32 [positions, D]: D / 2 cosines, D / 2 sines.
        there: [T] mask; False: the key is not rotated.
        D: Head dim.
    """
    T: tl.constexpr = keys.shape[0]
    half = tl.arange(0, D // 2)
    source = rope + positions[:, None].to(tl.int64) * D + half[None, :]
    cosine = tl.load(source, mask=there[:, None], other=0.0)
    sine = tl.load(source + D // 2, mask=there[:, None], other=0.0)
    pairs = tl.permute(tl.reshape(keys, (T, 2, D // 2)), (0, 2, 1))
    left, right = tl.split(pairs)
    turned = tl.join(left * cosine - right * sine, right * cosine + left * sine)
    return tl.reshape(tl.permute(turned, (0, 2, 1)), (T, D))


@triton.jit
def hadamard_matrix(D: tl.constexpr) -> tl.tensor:
    """Return Sylvester's matrix [D, D] of +1 and -1, float32; D <= 128."""
    i = tl.arange(0, D)
    ones = i[:, None] & i[None, :]
    ones ^= ones >> 4
    ones ^= ones >> 2
    ones ^= ones >> 1
    return (1 - 2 * (ones & 1)).to(tl.float32)


@triton.jit
def unchanged(
    acc: tl.tensor,
    mass: tl.tensor,
    PRODUCT: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """Return the weighted sum of the values unchanged."""
    return acc
