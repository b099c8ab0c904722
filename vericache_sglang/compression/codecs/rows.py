"""Rows over all heads, for codecs that mix heads, and keys before RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.codecs.sinks import other_slots
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from vericache_sglang.compression.codecs.base import PartSpec, Rotation, Source


def as_rows(entries: torch.Tensor) -> torch.Tensor:
    """Concatenate the heads of a slot: [H, T, D] to [T, H * D]."""
    return entries.transpose(0, 1).flatten(1)


def as_heads(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Split rows [T, H * D] into heads [H, T, D], the inverse of ``as_rows``."""
    return rows.view(len(rows), heads, -1).transpose(0, 1)


def before_rope(rope: Rotation | None, source: Source) -> torch.Tensor:
    """Undo RoPE on the keys.

    Args:
        rope: The model's rotary embedding.
        source: Keys and their positions.

    Returns:
        [H, T, D] float32.

    Raises:
        CompressionError: Rotation or positions are missing.
    """
    keys = source.keys.to(torch.float32)
    bound, positions = _bound(rope, source.positions)
    return bound(keys, positions, inverse=True)


def behind_rope(
    rope: Rotation | None, keys: torch.Tensor, draft: PartSpec
) -> torch.Tensor:
    """Rotate decoded keys to their original positions.

    Args:
        rope: The model's rotary embedding.
        keys: [H, T - n, D] float32, without the n sinks of the part.
        draft: The part the keys were decoded from.

    Returns:
        [H, T - n, D] float32.

    Raises:
        CompressionError: Rotation or positions are missing.
    """
    bound, positions = _bound(rope, draft.positions)
    others = other_slots(draft.tensors["sink_slots"], draft.part_shape.tokens)
    return bound(keys, positions.to(others.device)[..., others])


def _bound(
    rope: Rotation | None, positions: torch.Tensor | None
) -> tuple[Rotation, torch.Tensor]:
    """Require rotary embedding and positions.

    Raises:
        CompressionError: One is missing.
    """
    if rope is None:
        raise CompressionError("rope: the codec was not bound to the model's rotation")
    if positions is None:
        raise CompressionError("positions of the keys are needed")
    return rope, positions
