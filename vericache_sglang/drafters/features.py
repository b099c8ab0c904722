"""What the served model computed for the last tokens of every text."""

from __future__ import annotations

import torch


class Features:
    """One row per ``req_pool_idx``; hidden states by position in the text, a ring.

    A rejected draft's are replaced by those of the token that takes its position.

    Args:
        requests: Most running requests; their rows are 1 to ``requests``.
        length: Positions that are kept of a text.
        size: F, numbers per token.
        dtype: Of the head.
        device: Device of the forwards.

    Attributes:
        states: [requests + 1, length, F].
    """

    def __init__(
        self,
        requests: int,
        length: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.states = torch.zeros(
            requests + 1, length, size, dtype=dtype, device=device
        )

    @property
    def length(self) -> int:
        """Positions that are kept of a text."""
        return self.states.shape[1]

    def write(
        self, pool_idx: torch.Tensor, position: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Store hidden states.

        Args:
            pool_idx: [T] int64.
            position: [T] int64; those of one row lie within ``length``.
            hidden: [T, F], any dtype.
        """
        hidden = hidden.to(self.states.dtype)
        self.states[pool_idx, position % self.length] = hidden

    def read(self, pool_idx: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [..., F] at positions [...] that were written."""
        return self.states[pool_idx, position % self.length]
