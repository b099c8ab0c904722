"""Pending and drafted tokens of every request, where the next forward reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_kernels.board_commit import Board, BoardRows, Emission, board_commit
from vericache_sglang.engine.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.engine.state import RequestState


class TokenBoard:
    """One row per seat (``Req.kv.req_pool_idx``): the pending token, then the drafts.

    A forward's inputs are gathered from it and its outcome is written to it on the
    device, so the host launches the next forward before it has seen the last one's
    tokens.

    Args:
        seats: Rows, at least the row pool's.
        draft_length: Most drafts of a request, x.
        device: Where the forwards run.
    """

    def __init__(
        self, seats: int, draft_length: int, device: torch.device | str
    ) -> None:
        self.device = device
        self._board = Board(
            torch.zeros(seats, draft_length + 2, dtype=torch.int64, device=device),
            torch.zeros(seats, dtype=torch.int32, device=device),
        )

    @property
    def most(self) -> int:
        """Most tokens one row emits, x + 1."""
        return self._board.most

    def tokens(self, seats: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return [n] int64, the tokens at ``columns`` [n] of ``seats`` [n]."""
        return self._board.tokens[seats, columns]

    def pending(self, seats: torch.Tensor) -> torch.Tensor:
        """Return [n] int64, the pending tokens of ``seats`` [n]."""
        return self._board.tokens[seats, 0]

    def extra(self, seats: torch.Tensor, loose: torch.Tensor) -> torch.Tensor:
        """Return what the host does not know yet of its requests' lengths.

        Args:
            seats: [n] int64.
            loose: [n] int64; not 0 where the last emitting forward's outcome has not
                been heard. The host counts one token of it, which is certain.

        Returns:
            [n] int64, the further tokens it emitted; 0 where all is known.
        """
        further = self._board.emitted[seats].to(torch.int64) - 1
        return torch.where(loose != 0, further, 0)

    def start(self, seats: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note the first token after a prefill, or a plainly decoded one.

        Args:
            seats: [n] int64, unique.
            tokens: [n], any integer dtype.
        """
        self._board.tokens[seats, 0] = tokens.to(torch.int64)

    def commit(self, rows: BoardRows, target: torch.Tensor) -> Emission:
        """Draft and accept; see ``board_commit``."""
        return board_commit(self._board, rows, target)

    def put(self, states: Sequence[RequestState]) -> None:
        """Write what the host has decided: pending tokens and all drafts."""
        seats: list[int] = []
        columns: list[int] = []
        tokens: list[int] = []
        for state in states:
            text = [state.pending, *state.drafts]
            seats += [state.seat] * len(text)
            columns += range(len(text))
            tokens += text
        at, column, token = upload(self.device, seats, columns, tokens)
        self._board.tokens[at, column] = token
