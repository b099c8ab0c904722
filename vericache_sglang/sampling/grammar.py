"""A request's grammar, moved ahead over drafts and taken back to the verified text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

MOST_DRAFTS = 199
"""Tokens a grammar can take back: xgrammar keeps 200 (``MAX_ROLLBACK_TOKENS``)."""


class GrammarCursor:
    """Walks SGLang's grammar object of one request over text that may be rejected.

    SGLang advances the grammar over verified tokens when it processes a result, so
    whenever SGLang looks, the cursor must stand at the verified text: after a
    verification and after a release, not while drafts are being made.

    Args:
        grammar: ``Req.grammar``, with ``rollback``.
    """

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar
        self._ahead = 0
        self._ended = False
        self._allowed: torch.Tensor | None = None

    def mask_next(self, mask: torch.Tensor, row: int) -> None:
        """Write which tokens may follow the text at the cursor.

        Args:
            mask: What the grammar's ``allocate_vocab_mask`` made, all allowed.
            row: Row of the mask.
        """
        grammar = self._grammar
        if not grammar.finished and not grammar.is_terminated():
            grammar.fill_vocab_mask(mask, row)
        self._allowed = mask[row]

    def draft(self, token: int) -> bool:
        """Step over one draft; say whether another one can follow.

        Where nothing was allowed the draft is any token. It is not shown to the
        grammar: llguidance would not take it back.
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
        """Write the masks of a verification's positions, and go back to the start.

        Args:
            drafts: d drafted tokens.
            mask: As for ``mask_next``.
            rows: d + 1 rows of the mask.

        Returns:
            How many positions mean something, 1 to d + 1: none follows the token that
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
        """Take every draft back."""
        if self._ahead:
            # SGLang sets it anew with every result, also while drafts are ahead; and
            # llguidance takes an end token back only where it is set.
            if self._ended:
                self._grammar.finished = True
            self._grammar.rollback(self._ahead)
            self._ahead, self._ended = 0, False
        self._allowed = None


def _bit(words: torch.Tensor, token: int) -> bool:
    """Read a token's bit of a packed [V / 32] int32 mask."""
    return bool(int(words[token // 32]) >> (token % 32) & 1)
