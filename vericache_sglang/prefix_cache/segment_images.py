"""Draft KV of a cached segment on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class DraftPart:
    """Draft KV of one segment: n kept tokens per layer and head.

    Attributes:
        slots: [n] int64, slots of the KV entries, in whole pages.
        kept: [L, H, n] int32 on the pool's device, positions of the kept tokens in the
            segment.
        users: Number of requests that use the slots.
    """

    slots: torch.Tensor
    kept: torch.Tensor
    users: int = 0
