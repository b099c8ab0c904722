"""SGLang's hash of (seed, position, column) in torch, without sgl_kernel."""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _LOW


def _mix(h: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _rotate((block * 0xCC9E2D51) & _LOW, 15)
    block = (block * 0x1B873593) & _LOW
    return (_rotate(h ^ block, 13) * 5 + 0xE6546B64) & _LOW


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor
) -> torch.Tensor:
    """Hash (seed, position, column) to 32 bits, bit for bit as the Triton kernel.

    Args:
        seed: [n] uint64 or int64.
        positions: [n] integer, below 2 ** 32.
        col_indices: [m] integer, below 2 ** 32.

    Returns:
        [n, m] uint32.
    """
    seed = seed.to(torch.int64)[:, None]
    h = _mix(torch.zeros_like(seed), seed & _LOW)
    h = _mix(h, (seed >> 32) & _LOW)
    h = _mix(h, positions.to(torch.int64)[:, None] & _LOW)
    h = _mix(h, col_indices.to(torch.int64)[None, :] & _LOW) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _LOW
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _LOW
    return (h ^ (h >> 16)).to(torch.uint32)
