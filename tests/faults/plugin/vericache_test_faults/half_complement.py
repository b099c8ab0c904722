"""The verify row reads a stranger's slot in place of half the complement.

One wrong slot of a thousand changes no token; that is for the row's own test
(``tests/engine/test_rows.py``), which checks every slot.
"""

from vericache_sglang.engine.rows import MixedRows


def install():
    """Overwrite the first half of the staged slots in every shadow row."""
    right = MixedRows._whole_row

    def wrong(self, own, state):
        shadow = right(self, own, state)
        exact, staged = state.parts.budget.exact, state.parts.budget.staged
        self._table[shadow][exact : exact + staged // 2] = 1
        return shadow

    MixedRows._whole_row = wrong
