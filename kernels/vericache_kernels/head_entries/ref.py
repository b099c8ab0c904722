"""Torch reference of per-head gather and scatter, copying whole entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size -> integer dtype; torch's gather rewrites NaN payloads of bfloat16."""


def as_integers(entries: torch.Tensor) -> torch.Tensor:
    """Return a view of entries as integers of the same size.

    Raises:
        ValueError: No integer dtype has their size.
    """
    size = entries.element_size()
    if size not in INTEGERS:
        raise ValueError(f"{entries.dtype} has {size} bytes: one of {list(INTEGERS)}")
    return entries.view(INTEGERS[size])


def pick_rows(
    layer: Sequence[torch.Tensor], index: torch.Tensor, slots: torch.Tensor | None
) -> list[torch.Tensor]:
    """See ``pick_entries``; any device."""
    tokens, heads = _named(index, slots)
    picked = []
    for side in layer:
        entries = as_integers(side)
        if entries.is_contiguous():
            # A gather over [T, H, D] indexes each number; this copies whole entries.
            flat = entries.view(-1, side.shape[2])
            rows = flat.index_select(0, (tokens * len(heads) + heads).view(-1))
            rows = rows.view(*tokens.shape, side.shape[2])
        else:
            rows = entries[tokens, heads]
        picked.append(rows.view(side.dtype))
    return picked


def put_rows(
    layer: Sequence[torch.Tensor],
    index: torch.Tensor,
    rows: Sequence[torch.Tensor],
    slots: torch.Tensor | None,
) -> None:
    """See ``put_entries``; any device."""
    tokens, heads = _named(index, slots)
    for side, part in zip(layer, rows, strict=True):
        entries = as_integers(side)
        if entries.is_contiguous():
            flat, own = entries.view(-1, side.shape[2]), as_integers(part)
            cells = (tokens * len(heads) + heads).view(-1)
            flat.index_copy_(0, cells, own.reshape(-1, side.shape[2]))
        else:
            entries[tokens, heads] = as_integers(part)


def _named(
    index: torch.Tensor, slots: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the selected entries, [n, H] int64, and the heads [H]."""
    tokens = index.t().long()
    heads = torch.arange(index.shape[0], device=index.device)
    return (tokens if slots is None else slots[tokens]).contiguous(), heads
