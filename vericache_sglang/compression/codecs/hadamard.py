"""The Walsh-Hadamard transform, normalized: symmetric, and its own inverse."""

from __future__ import annotations

import torch

from vericache_sglang.errors import CompressionError


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Transform along the last dimension (Sylvester's order).

    Args:
        rows: [..., n] float, n a power of two; not modified.

    Returns:
        [..., n], with unchanged norms of rows; O(n log n) per row.

    Raises:
        CompressionError: n is not a power of two.
    """
    size = rows.shape[-1]
    if size < 1 or size & (size - 1):
        raise CompressionError(f"hadamard: {size} is not a power of two")
    result, half = rows, 1
    while half < size:
        pairs = result.reshape(*rows.shape[:-1], size // (2 * half), 2, half)
        left, right = pairs.unbind(-2)
        result = torch.stack([left + right, left - right], dim=-2)
        half *= 2
    normalized: torch.Tensor = result.reshape(rows.shape) * size**-0.5
    return normalized
