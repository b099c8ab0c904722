"""Bit packing: codes of 1 to 8 bits, without gaps, along the last dimension."""

from __future__ import annotations

import torch
from torch.nn import functional

from vericache_sglang.errors import CompressionError


def packed_bytes(count: int, bits: int) -> int:
    """Return the bytes of ``count`` packed codes of ``bits`` bits, rounded up."""
    return -(-count * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes without gaps, little-endian.

    Bit j of code i becomes bit ``i * bits + j`` of its row, bit 0 being the lowest of
    byte 0; bits after the last code are zero. Eight codes fill ``bits`` bytes.

    Args:
        codes: [..., n] uint8, values below ``2**bits``; larger ones are not detected,
            because a check would need a host sync.
        bits: Width of a code, 1 to 8.

    Returns:
        [..., ceil(n * bits / 8)] uint8; with 8 bits the codes themselves.

    Raises:
        CompressionError: Wrong dtype or width.
    """
    _check(codes, bits, "codes")
    if bits == 8:
        return codes
    *rows, count = codes.shape
    octets = -(-count // 8)
    padded = functional.pad(codes, (0, octets * 8 - count)).view(*rows, octets, 8)
    words = torch.zeros(*rows, octets, 1, dtype=torch.int64, device=codes.device)
    for place in range(8):
        words |= padded[..., place : place + 1].to(torch.int64) << place * bits
    # The lowest byte of a word comes first on every machine torch runs on.
    packed = words.view(torch.uint8)[..., :bits].reshape(*rows, octets * bits)
    return packed[..., : packed_bytes(count, bits)].contiguous()


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack codes, the inverse of ``pack``.

    Args:
        packed: [..., ceil(count * bits / 8)] uint8.
        bits: Width of a code, 1 to 8.
        count: n, codes in a row.

    Returns:
        [..., n] uint8; with 8 bits ``packed`` itself.

    Raises:
        CompressionError: Wrong dtype or width, or rows of the wrong length.
    """
    _check(packed, bits, "packed")
    *rows, length = packed.shape
    if length != packed_bytes(count, bits):
        raise CompressionError(
            f"packed: {count} codes of {bits} bits are "
            f"{packed_bytes(count, bits)} bytes, got rows of {length}"
        )
    if bits == 8:
        return packed
    octets = -(-count // 8)
    padded = functional.pad(packed, (0, octets * bits - length))
    padded = functional.pad(padded.view(*rows, octets, bits), (0, 8 - bits))
    places = torch.arange(0, 8 * bits, bits, device=packed.device)
    words = (padded.view(torch.int64) >> places).bitwise_and_((1 << bits) - 1)
    codes = words.to(torch.uint8).view(*rows, octets * 8)
    return codes[..., :count].contiguous()


def pack_wide(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of any width: low bytes as planes, then the remaining bits packed.

    Args:
        codes: [..., n] int16 or int32, values in [0, 2**bits).
        bits: Width of a code, 0 to 15 or 31.

    Returns:
        [..., ceil(n * bits / 8)] uint8: n lowest bytes, n second bytes and so on, then
        the top ``bits % 8`` bits in the layout of ``pack``.
    """
    planes = [(codes >> 8 * plane & 0xFF).to(torch.uint8) for plane in range(bits // 8)]
    if bits % 8:
        top = (codes >> bits // 8 * 8).to(torch.uint8)
        planes.append(pack(top, bits % 8))
    if not planes:
        return codes.new_empty(*codes.shape[:-1], 0, dtype=torch.uint8)
    return torch.cat(planes, dim=-1)


def unpack_wide(
    packed: torch.Tensor, bits: int, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """Unpack codes, the inverse of ``pack_wide``.

    Args:
        packed: [..., ceil(count * bits / 8)] uint8.
        bits: Width of a code, 0 to 15 or 31.
        count: n, codes in a row.
        dtype: int16 or int32.

    Returns:
        [..., n] of ``dtype``.
    """
    whole = bits // 8
    codes = packed.new_zeros(*packed.shape[:-1], count, dtype=dtype)
    for plane in range(whole):
        part = packed[..., plane * count : (plane + 1) * count]
        codes |= part.to(dtype) << 8 * plane
    if bits % 8:
        top = unpack(packed[..., whole * count :], bits % 8, count)
        codes |= top.to(dtype) << 8 * whole
    return codes


def _check(rows: torch.Tensor, bits: int, field: str) -> None:
    """Check that codes are uint8 and that the width is allowed.

    Raises:
        CompressionError: One of them is not.
    """
    if not 1 <= bits <= 8:
        raise CompressionError(f"bits must be 1 to 8, got {bits}")
    if rows.dtype != torch.uint8 or rows.dim() == 0:
        raise CompressionError(
            f"{field} must be rows of uint8, got {rows.dtype} {tuple(rows.shape)}"
        )
