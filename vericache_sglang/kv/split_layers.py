"""Gather and scatter of kept and residual entries, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_kernels.head_entries import pick_entries, put_entries
from vericache_sglang.compression.budget import residual_indices
from vericache_sglang.compression.placed import placed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INDICES = 2**22
"""Most indices computed at once: 16 MiB, and as much again as workspace."""

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


def dropped_by_layer(kept: torch.Tensor, offered: int) -> Iterator[torch.Tensor]:
    """Yield, layer by layer, the tokens that are not kept.

    Layers are processed in groups of at most ``INDICES`` indices; a group takes the
    kernel launches of one layer.

    Args:
        kept: [L, H, n] int32, ascending and unique per head, in [0, offered).
        offered: T, in tokens.

    Yields:
        [H, T - n] int32, ascending.
    """
    heads = kept.shape[1]
    for group in kept.split(max(1, INDICES // (heads * offered))):
        rows = residual_indices(group.flatten(0, 1), offered)
        yield from rows.view(len(group), heads, -1)


def rest_of(
    kept: Sequence[torch.Tensor], tokens: int, starts: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Yield, layer by layer, one index of the tokens that parts of a prompt drop.

    Args:
        kept: For each part [L, H, n] int32, ascending, in [0, tokens).
        tokens: Tokens per part.
        starts: First token of each part; ascending.

    Yields:
        [H, parts * (tokens - n)] int32, ascending; nothing without parts.
    """
    if not kept:
        return
    heads, parts = kept[0].shape[1], len(kept)
    together = torch.stack(list(kept), dim=2).flatten(1, 2)
    first = placed(torch.tensor(starts, dtype=torch.int32), together.device)
    for rest in dropped_by_layer(together, tokens):
        yield (rest.view(heads, parts, -1) + first[:, None]).flatten(1)


def put(entries: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Scatter per head, the inverse of ``pick``.

    Args:
        entries: [T, H, D]; rows named by ``index`` are overwritten.
        index: [H, n] int64, values in [0, T), unique per head.
        rows: [n, H, D].
    """
    put_entries([entries], index, [rows])


def join_layer(
    kept_entries: torch.Tensor, kept: torch.Tensor, dropped_entries: torch.Tensor
) -> torch.Tensor:
    """Restore one layer's keys or values to prompt order.

    Args:
        kept_entries: [n, H, D] on the device.
        kept: [H, n] int64 on the device.
        dropped_entries: [m, H, D] on the device.

    Returns:
        [n + m, H, D], in order of position, bit-exact.
    """
    total = kept_entries.shape[0] + dropped_entries.shape[0]
    joined = kept_entries.new_empty(total, *kept_entries.shape[1:])
    put(joined, kept, kept_entries)
    put(joined, residual_indices(kept, total), dropped_entries)
    return joined
