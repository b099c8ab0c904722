"""Attention sinks: tokens stored exactly in the draft KV, beside its codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_sglang.compression.budget import residual_indices
from vericache_sglang.compression.codecs.floats import FORMATS
from vericache_sglang.compression.placed import placed
from vericache_sglang.errors import CompressionError

if TYPE_CHECKING:
    from vericache_sglang.compression.codecs.base import (
        Layout,
        PartShape,
        Source,
        Tensors,
    )


def sink_layout(part_shape: PartShape) -> Layout:
    """Return the fields of ``part_shape.exact_tokens`` exact tokens."""
    rows = (part_shape.heads, part_shape.exact_tokens)
    return {
        "sink_slots": (torch.int32, (part_shape.exact_tokens,)),
        "sink_keys": (part_shape.dtype, (*rows, part_shape.key_dim)),
        "sink_values": (part_shape.dtype, (*rows, part_shape.value_dim)),
    }


def sink_fields(source: Source, sinks: torch.Tensor) -> Tensors:
    """Copy the exact tokens of one layer.

    Args:
        sinks: [n] integers on any device.

    Returns:
        The fields of ``sink_layout``.

    Raises:
        CompressionError: The sinks are not ascending, unique and in [0, T).
    """
    slots = placed(_checked(sinks, source.part_shape.tokens), source.keys.device)
    return {
        "sink_slots": slots,
        "sink_keys": take(source.keys, slots),
        "sink_values": take(source.values, slots),
    }


def _checked(sinks: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return sinks as int32.

    Args:
        sinks: [n] integers.
        tokens: T, number of slots.

    Raises:
        CompressionError: They are not ascending, unique and in [0, T).
    """
    if sinks.shape == (0,):  # nothing to wait for a GPU for
        return sinks.to(torch.int32)
    slots = sinks.to(torch.int64)
    bounded = sinks.dim() == 1 and bool(((slots >= 0) & (slots < tokens)).all())
    if not bounded or not bool((slots.diff() > 0).all()):
        raise CompressionError(
            f"sinks must be ascending slots in [0, {tokens}), got {sinks.tolist()}"
        )
    return slots.to(torch.int32)


def other_slots(sinks: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the slots of [0, T) that are not sinks, ascending, int64."""
    return residual_indices(sinks.to(torch.int64)[None], tokens)[0]


def take(entries: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return [H, n, D], the given slots of [H, T, D], bit for bit."""
    # torch's gather may rewrite NaN payloads of bfloat16, so integers are moved.
    bits = entries.view(FORMATS[entries.dtype].integer)
    return bits.index_select(1, slots.to(torch.int64)).view(entries.dtype)


def blend(
    others: torch.Tensor, exact: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Merge exact tokens and the others by slot, the inverse of two ``take``.

    Args:
        others: [H, T - n, D], the slots that are not sinks.
        exact: [H, n, D], dtype of ``others``.
        sinks: [n] slots.

    Returns:
        [H, T, D].
    """
    integer = FORMATS[exact.dtype].integer
    tokens = others.shape[1] + exact.shape[1]
    bits = exact.new_empty(exact.shape[0], tokens, exact.shape[2]).view(integer)
    bits[:, other_slots(sinks, tokens)] = others.view(integer)
    bits[:, sinks.to(torch.int64)] = exact.view(integer)
    return bits.view(exact.dtype)
