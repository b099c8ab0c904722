"""Device buffer of every request's pending and drafted tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_kernels.token_commit import (
    DRAFT,
    DraftTokenRows,
    DraftTokens,
    Emission,
    token_commit,
)
from vericache_sglang.device.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.drafters.texts import Texts
    from vericache_sglang.kv.request import RequestState


class DraftTokenBuffer:
    """One row per ``Req.kv.req_pool_idx``: the pending token, the drafts, their counts.

    Forwards gather their inputs from it and write their results to it on the device,
    so the host can launch a forward before it has seen the previous one's tokens.

    Args:
        pool_indices: Number of rows, at least that of the request pool.
        most_drafts: Maximum drafts of one verification.
        device: Device of the forwards.
        texts: Receives every token by its position; None without an inner drafter.
    """

    def __init__(
        self,
        pool_indices: int,
        most_drafts: int,
        device: torch.device | str,
        texts: Texts | None = None,
    ) -> None:
        self.device = device
        self._texts = texts
        self._draft_tokens = DraftTokens(
            torch.zeros(
                pool_indices, most_drafts + 2, dtype=torch.int64, device=device
            ),
            torch.zeros(pool_indices, dtype=torch.int32, device=device),
            torch.zeros(pool_indices, dtype=torch.int64, device=device),
        )
        self._pending = self._draft_tokens.tokens[:, 0]

    @property
    def most(self) -> int:
        """Maximum tokens that one row emits."""
        return self._draft_tokens.most

    def tokens(self, pool_indices: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return [n] int64, the tokens at ``columns`` [n] of ``pool_indices`` [n]."""
        return self._draft_tokens.tokens[pool_indices, columns]

    def pending(self, pool_indices: torch.Tensor) -> torch.Tensor:
        """Return [n] int64, the pending tokens of ``pool_indices`` [n]."""
        return self._pending.index_select(0, pool_indices)

    def drafted(self, pool_indices: torch.Tensor) -> torch.Tensor:
        """Return [n] int32, the exact number of drafts, reported or not."""
        return self._draft_tokens.drafted[pool_indices]

    def verified(self, pool_indices: torch.Tensor) -> torch.Tensor:
        """Return [n] int64, the exact position of the pending token in the text."""
        return self._draft_tokens.verified[pool_indices]

    def start(
        self, pool_indices: torch.Tensor, tokens: torch.Tensor, verified: torch.Tensor
    ) -> None:
        """Store the pending token after a prefill or an autoregressive decode.

        Args:
            pool_indices: [n] int64, unique.
            tokens: [n], any integer dtype.
            verified: [n], any integer dtype, tokens before the pending one.
        """
        verified = verified.to(torch.int64)
        # Cheaper on a CPU than assignments by an index: it is part of every token.
        self._pending.index_copy_(0, pool_indices, tokens.to(torch.int64))
        self._draft_tokens.drafted.index_fill_(0, pool_indices, 0)
        self._draft_tokens.verified.index_copy_(0, pool_indices, verified)
        if self._texts is not None:
            self._texts.write(pool_indices, verified, tokens[:, None])

    def propose(
        self,
        pool_indices: torch.Tensor,
        columns: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Store proposals behind the drafts, where the next forward runs them.

        Args:
            pool_indices: [n] int64.
            columns: [n] int64, distinct for equal ``pool_indices``.
            tokens: [n] int64, token ids.
        """
        self._draft_tokens.tokens[pool_indices, columns] = tokens

    def commit(self, rows: DraftTokenRows, target: torch.Tensor) -> Emission:
        """Draft and accept; see ``token_commit``. All rows must have queries."""
        if self._texts is None:
            return token_commit(self._draft_tokens, rows, target)
        drafted = self.drafted(rows.pool_idx) * (rows.kind == DRAFT)
        position = self.verified(rows.pool_idx) + drafted + 1
        emission = token_commit(self._draft_tokens, rows, target)
        self._texts.write(rows.pool_idx, position, emission.tokens)
        return emission

    def put(self, states: Sequence[RequestState]) -> None:
        """Write tokens and counts that the host has chosen; all must be reported."""
        pool_indices: list[int] = []
        columns: list[int] = []
        tokens: list[int] = []
        for state in states:
            text = [state.pending, *state.drafts]
            pool_indices += [state.req_pool_idx] * len(text)
            columns += range(len(text))
            tokens += text
        at, column, token, own, drafted, verified = upload(
            self.device,
            pool_indices,
            columns,
            tokens,
            [state.req_pool_idx for state in states],
            [len(state.drafts) for state in states],
            [state.verified for state in states],
        )
        self._draft_tokens.tokens[at, column] = token
        self._draft_tokens.drafted[own] = drafted.to(torch.int32)
        self._draft_tokens.verified[own] = verified
        if self._texts is not None:
            for state in states:  # what was emitted since the last call, and drafts
                tail = state.outputs[-self.most :]
                self._texts.put(
                    state.req_pool_idx,
                    [*tail, *state.drafts],
                    state.verified + 1 - len(tail),
                )
