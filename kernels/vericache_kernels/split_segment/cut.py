"""Which tokens of a segment stay in the pool, and which leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Which tokens of a segment stay and which leave; T tokens, H KV heads.

    Attributes:
        slots: [T] int64, the pool slot of every token, in token order, unique.
        kept: [H, n] int32 or int64 in [0, T), the tokens that stay, unique per head.
        rest: [H, m] as ``kept``, the tokens that leave, none of them kept.
    """

    slots: torch.Tensor
    kept: torch.Tensor
    rest: torch.Tensor
