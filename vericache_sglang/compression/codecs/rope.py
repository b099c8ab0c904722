"""Rotary embedding of half against half, and its inverse (arXiv:2104.09864)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vericache_sglang.errors import CompressionError


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotates pair (i, i + R/2) of a key by ``position * frequencies[i]``.

    Codecs that work on keys before RoPE undo it with the original positions; the error
    is that of the KV's own dtype.

    Attributes:
        frequencies: [R / 2] float32, radians per token, as the model has them. A key's
            elements from R on are not rotated.
        amplitude: Factor on sine and cosine (YaRN, arXiv:2309.00071); the inverse
            divides by it.
    """

    frequencies: torch.Tensor
    amplitude: float = 1.0

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        """Rotate.

        Args:
            keys: [H, T, D] float32; not modified.
            positions: [T] or [H, T] integers.
            inverse: Undo the rotation instead.

        Returns:
            [H, T, D] float32.

        Raises:
            CompressionError: There are more frequencies than pairs.
        """
        half = self.frequencies.shape[0]
        if 2 * half > keys.shape[2]:
            raise CompressionError(
                f"rope: {half} frequencies rotate {2 * half} elements, "
                f"keys have {keys.shape[2]}"
            )
        where = positions.to(keys.device, torch.float32)
        angles = where[..., None] * self.frequencies.to(keys.device)
        factor = 1 / self.amplitude if inverse else self.amplitude
        cosine, sine = angles.cos() * factor, angles.sin() * factor
        if inverse:
            sine = -sine
        left, right, rest = keys.split([half, half, keys.shape[2] - 2 * half], dim=2)
        return torch.cat(
            [left * cosine - right * sine, right * cosine + left * sine, rest], dim=2
        )
