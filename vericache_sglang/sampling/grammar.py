"""Grammar state of a request, advanced over drafts and rolled back after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

MOST_DRAFTS = 199
"""Tokens a grammar can roll back: xgrammar keeps 200 (``MAX_ROLLBACK_TOKENS``)."""


class GrammarCursor:
    """Advances SGLang's grammar object of one request over drafts.

    SGLang advances the grammar over verified tokens when it processes a result, so the
    cursor must be at the end of the verified text whenever SGLang uses the grammar:
    after a verification and after a release, but not during drafting.

    Args:
        grammar: ``Req.grammar``, with ``rollback``.
    """

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar
        self._ahead = 0
        self._ended = False
        self._allowed: torch.Tensor | None = None

    def mask_next(self, mask: torch.Tensor, row: int) -> None:
        """Write the mask of tokens allowed at the cursor.

        Args:
            mask: From the grammar's ``allocate_vocab_mask``, with all tokens allowed.
        """
        grammar = self._grammar
        if not grammar.finished and not grammar.is_terminated():
            grammar.fill_vocab_mask(mask, row)
        self._allowed = mask[row]

    def draft(self, token: int) -> bool:
        """Advance over one draft; return whether another draft can follow.

        If no token was allowed the draft is arbitrary. It is not passed to the grammar,
        because llguidance could not roll it back.
        """
        allowed, self._allowed = self._allowed, None
        if allowed is not None and not _bit(allowed, token):
            return False
        self._grammar.accept_token(token)
        self._ahead += 1
        self._ended = self._grammar.finished
        return not self._grammar.is_terminated()

    def mask_verified(
        self, drafts: Sequence[int], mask: torch.Tensor, rows: range
    ) -> int:
        """Write the masks of a verification's positions, then roll back.

        Args:
            drafts: d drafted tokens.
            mask: As for ``mask_next``.
            rows: d + 1 rows of the mask.

        Returns:
            The number of valid positions, 1 to d + 1: none follows the token that
            completes the text.
        """
        self.settle()
        usable = 1
        self.mask_next(mask, rows[0])
        for row, token in zip(rows[1:], drafts, strict=True):
            if not self.draft(token):
                break
            self.mask_next(mask, row)
            usable += 1
        self.settle()
        return usable

    def settle(self) -> None:
        """Roll back every draft."""
        if self._ahead:
            # SGLang sets it with every result, also during drafting, and llguidance
            # rolls back an end token only if it is set.
            if self._ended:
                self._grammar.finished = True
            self._grammar.rollback(self._ahead)
            self._ahead, self._ended = 0, False
        self._allowed = None


def _bit(words: torch.Tensor, token: int) -> bool:
    """Read a token's bit of a packed [V / 32] int32 mask."""
    return bool(int(words[token // 32]) >> (token % 32) & 1)
