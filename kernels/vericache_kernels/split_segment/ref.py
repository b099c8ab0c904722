"""Torch reference of ``split_segment``: gathers everything before it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vericache_kernels.split_segment.cut import Cut, Pair

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


def split_entries(pool: Pair, cut: Cut, target: torch.Tensor, block: Pair) -> None:
    """See ``split_segment``; ``target`` and ``cut.slots`` may overlap."""
    heads = torch.arange(cut.kept.shape[0], device=cut.kept.device)
    for side, part in zip(pool, block, strict=True):
        entries = as_integers(side)
        kept = entries[cut.slots[cut.kept.long().t()], heads]
        as_integers(part).copy_(entries[cut.slots[cut.rest.long().t()], heads])
        entries[target] = kept


def join_entries(pool: Pair, cut: Cut, source: torch.Tensor, block: Pair) -> None:
    """See ``join_segment``; ``source`` and ``cut.slots`` may overlap."""
    heads = torch.arange(cut.kept.shape[0], device=cut.kept.device)
    for side, part in zip(pool, block, strict=True):
        entries = as_integers(side)
        kept = entries[source]
        entries[cut.slots[cut.kept.long().t()], heads] = kept
        entries[cut.slots[cut.rest.long().t()], heads] = as_integers(part)
