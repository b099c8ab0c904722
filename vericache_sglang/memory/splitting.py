"""Splitting one layer's prompt KV in two parts, and joining the parts again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_kernels.head_entries import pick_entries, put_entries
from vericache_sglang.compression.budget import complement_indices

if TYPE_CHECKING:
    from vericache_sglang.memory.complement import RawComplement

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size: torch's gather rewrites NaN payloads of bfloat16."""


def as_bits(entries: torch.Tensor) -> torch.Tensor:
    """View ``entries`` as integers of the same size; moves bytes, keeps every bit."""
    return entries.view(BITS[entries.element_size()])


def pick(entries: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gather per head.

    Args:
        entries: [T, H, D].
        index: [H, n] int64, values in [0, T).

    Returns:
        [n, H, D]: row i of head h is ``entries[index[h, i], h]``.
    """
    return pick_entries([entries], index)[0]


def pick_rest(
    keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather, per head, the entries that are not kept.

    Args:
        keys: [T, H, D] of one layer in prompt order.
        values: [T, H, Dv].
        kept: [H, n] integers on any device, in [0, T), ascending and unique per head.

    Returns:
        Keys [T - n, H, D] and values [T - n, H, Dv], in prompt order.
    """
    rest = complement_indices(kept.to(keys.device, torch.int64), keys.shape[0])
    first, second = pick_entries([keys, values], rest)
    return first, second


def put(entries: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Scatter per head, the inverse of ``pick``.

    Args:
        entries: [T, H, D]; rows named by ``index`` are overwritten.
        index: [H, n] int64, values in [0, T), unique per head.
        rows: [n, H, D].
    """
    put_entries([entries], index, [rows])


def split_layer(
    keys: torch.Tensor,
    values: torch.Tensor,
    kept: torch.Tensor,
    dropped: torch.Tensor,
    complement: RawComplement,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the dropped entries of one layer to the host and gather the kept ones.

    Args:
        keys: [T, H, D] of one layer in prompt order.
        values: [T, H, Dv].
        kept: [H, n] int64.
        dropped: [H, m] int64; with ``kept`` every token once per head.
        complement: Receives layer ``layer`` and is sealed there.
        layer: Layer index.

    Returns:
        Kept keys [n, H, D] and values [n, H, Dv], freshly allocated on the device.
    """
    complement.keys[layer].copy_(pick(keys, dropped))
    complement.values[layer].copy_(pick(values, dropped))
    complement.kept[layer].copy_(kept)
    complement.seal(layer)
    return pick(keys, kept), pick(values, kept)


def join_layer(
    kept_entries: torch.Tensor, kept: torch.Tensor, dropped_entries: torch.Tensor
) -> torch.Tensor:
    """Restore one layer's keys or values to prompt order.

    Args:
        kept_entries: [n, H, D] on the device.
        kept: [H, n] int64 on the device.
        dropped_entries: [m, H, D] on the device.

    Returns:
        [n + m, H, D], every bit as it was before ``split_layer``.
    """
    total = kept_entries.shape[0] + dropped_entries.shape[0]
    joined = kept_entries.new_empty(total, *kept_entries.shape[1:])
    put(joined, kept, kept_entries)
    put(joined, complement_indices(kept, total), dropped_entries)
    return joined
