"""Grammar state of a request, advanced over drafts and rolled back after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from sglang.srt.managers.schedule_batch import Req

MOST_DRAFTS = 199
"""Tokens a grammar can roll back: xgrammar keeps 200 (``MAX_ROLLBACK_TOKENS``)."""


def note_end(req: Req) -> None:
    """Note whether a request's grammar has ended, before it accepts further tokens.

    The hook on ``update_finish_state`` reads it (patches: managers_schedule_batch).
    """
    req.vericache_grammar_ended = len(req.output_ids), req.grammar.is_terminated()


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
        # Masks of the next drafts; unknown ones are not checked.
        self._allowed: list[torch.Tensor] = []

    def draft(self, token: int) -> bool:
        """Advance over one draft; return whether another draft can follow.

        If no token was allowed, or the grammar has ended, the draft is arbitrary. It is
        not passed to the grammar, which could not roll it back.
        """
        if self._grammar.is_terminated():
            return False
        if self._allowed and not _bit(self._allowed.pop(0), token):
            return False
        self._grammar.accept_token(token)
        self._ahead += 1
        self._ended = self._grammar.finished
        return not self._grammar.is_terminated()

    def mask_after(self, tokens: Sequence[int], mask: torch.Tensor, rows: range) -> int:
        """Write the masks of positions from the cursor on, which stays where it is.

        Args:
            tokens: n tokens, drafts or proposals, between the positions.
            mask: From the grammar's ``allocate_vocab_mask``, with all tokens allowed.
            rows: n + 1 rows of the mask.

        Returns:
            The number of valid positions, 1 to n + 1: none follows the token that
            completes the text, or one that is not allowed.
        """
        grammar, start = self._grammar, self._ahead
        seen: list[torch.Tensor] = []
        for row, token in zip(rows, [*tokens, None], strict=True):
            going = not grammar.finished and not grammar.is_terminated()
            if going:
                grammar.fill_vocab_mask(mask, row)
            seen.append(mask[row])
            self._allowed = seen[-1:]
            if token is None or not going or not self.draft(token):
                break
        self._roll_back(self._ahead - start)
        self._allowed = seen
        return len(seen)

    def until_end(self, tokens: Sequence[int]) -> int:
        """Return how many of some verified tokens there are up to the grammar's end.

        Args:
            tokens: >= 1; the cursor is in front of them.
        """
        drafts = (i for i, each in enumerate(tokens, 1) if not self.draft(each))
        count = next(drafts, len(tokens))
        self.settle()
        return count

    def settle(self) -> None:
        """Roll back every draft."""
        self._roll_back(self._ahead)
        self._allowed = []

    def _roll_back(self, drafts: int) -> None:
        if not drafts:
            return
        # SGLang sets it with every result, also during drafting, and llguidance rolls
        # back an end token only if it is set.
        if self._ended:
            self._grammar.finished = True
        self._grammar.rollback(drafts)
        self._ahead -= drafts
        self._ended = False


def _bit(words: torch.Tensor, token: int) -> bool:
    """Read a token's bit of a packed [V / 32] int32 mask."""
    return bool(int(words[token // 32]) >> (token % 32) & 1)
