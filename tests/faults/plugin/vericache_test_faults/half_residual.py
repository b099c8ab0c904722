"""The verify row reads a stranger's slot in place of half the complement.

One wrong slot of a thousand changes no token; that is for the row's own test
(``tests/runtime/test_rows.py``), which checks every slot.
"""

from vericache_sglang.runtime.forward.rows import MixedRows


def install():
    """Overwrite the first half of the staged slots in every shadow row."""
    right = MixedRows._whole_row

    def wrong(self, own, state, queries):
        draft_row = right(self, own, state, queries)
        exact, staged = state.parts.budget.exact, state.parts.budget.staged
        self._table[draft_row][exact : exact + staged // 2] = 1
        return draft_row

    MixedRows._whole_row = wrong
