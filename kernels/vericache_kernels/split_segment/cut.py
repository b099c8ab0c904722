"""Which tokens of a segment stay in the pool, and which leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Kept and remaining tokens of a segment; T tokens, H KV heads.

    Attributes:
        slots: [T] int64, the pool slot of every token, in token order, unique.
        kept: [H, n] int32 or int64 in [0, T), the kept tokens, unique per head.
        rest: [H, m] as ``kept``, the other tokens; disjoint from ``kept`` per head.
    """

    slots: torch.Tensor
    kept: torch.Tensor
    rest: torch.Tensor
