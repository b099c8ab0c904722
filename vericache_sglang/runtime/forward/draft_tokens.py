"""Device buffer of every request's pending and drafted tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_kernels.token_commit import (
    DraftTokenRows,
    DraftTokens,
    Emission,
    token_commit,
)
from vericache_sglang.device.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.kv.request import RequestState


class DraftTokenBuffer:
    """One row per ``Req.kv.req_pool_idx``: the pending token, then the drafts.

    Forwards gather their inputs from it and write their results to it on the device,
    so the host can launch a forward before it has seen the previous one's tokens.

    Args:
        pool_indices: Number of rows, at least that of the request pool.
        draft_length: x, maximum drafts of a request.
        device: Device of the forwards.
    """

    def __init__(
        self, pool_indices: int, draft_length: int, device: torch.device | str
    ) -> None:
        self.device = device
        self._draft_tokens = DraftTokens(
            torch.zeros(
                pool_indices, draft_length + 2, dtype=torch.int64, device=device
            ),
            torch.zeros(pool_indices, dtype=torch.int32, device=device),
        )

    @property
    def most(self) -> int:
        """Maximum tokens that one row emits, x + 1."""
        return self._draft_tokens.most

    def tokens(self, pool_indices: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return [n] int64, the tokens at ``columns`` [n] of ``pool_indices`` [n]."""
        return self._draft_tokens.tokens[pool_indices, columns]

    def pending(self, pool_indices: torch.Tensor) -> torch.Tensor:
        """Return [n] int64, the pending tokens of ``pool_indices`` [n]."""
        return self._draft_tokens.tokens[pool_indices, 0]

    def extra(
        self, pool_indices: torch.Tensor, pending_max: torch.Tensor
    ) -> torch.Tensor:
        """Return the emitted tokens that the host has not counted yet.

        Args:
            pool_indices: [n] int64.
            pending_max: [n] int64; nonzero if the last emitting forward has not been
                reported. The host counts one token of it, which is certain.

        Returns:
            [n] int64, the further tokens it emitted; 0 if all are reported.
        """
        further = self._draft_tokens.emitted[pool_indices].to(torch.int64) - 1
        return torch.where(pending_max != 0, further, 0)

    def start(self, pool_indices: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store the pending token after a prefill or an autoregressive decode.

        Args:
            pool_indices: [n] int64, unique.
            tokens: [n], any integer dtype.
        """
        self._draft_tokens.tokens[pool_indices, 0] = tokens.to(torch.int64)

    def commit(self, rows: DraftTokenRows, target: torch.Tensor) -> Emission:
        """Draft and accept; see ``token_commit``."""
        return token_commit(self._draft_tokens, rows, target)

    def put(self, states: Sequence[RequestState]) -> None:
        """Write the pending tokens and drafts that the host has chosen."""
        pool_indices: list[int] = []
        columns: list[int] = []
        tokens: list[int] = []
        for state in states:
            text = [state.pending, *state.drafts]
            pool_indices += [state.req_pool_idx] * len(text)
            columns += range(len(text))
            tokens += text
        at, column, token = upload(self.device, pool_indices, columns, tokens)
        self._draft_tokens.tokens[at, column] = token
