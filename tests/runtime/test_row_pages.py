"""Rows are made of whole pages, so SGLang's backends may read them by pages.

A backend that reads by pages (FlashAttention with ``--page-size``, TRT-LLM) looks only
at the first slot of every page of a row. Random histories hold every row that a forward
reads to that: own and shadow rows, drafts and verifications, with codes and without.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

from test_moves import PLANES, STEP, History, short_segments  # noqa: E402, F401
from tiny_engine import TinyEngine  # noqa: E402

PAGE = 4


class PagedEngine(TinyEngine):
    """Checks the rows of every forward."""

    def __init__(self, **options):
        super().__init__(page=PAGE, **options)
        self.read = Counter()

    def _only_row(self, state, action):
        row, slots = super()._only_row(state, action)
        length = row.prefix + len(slots)
        listed = self.table[row.table_row, :length].tolist()
        for start in range(0, length, PAGE):
            page = listed[start : start + PAGE]
            assert page[0] % PAGE == 0, "a page begins anywhere"
            assert page == list(range(page[0], page[0] + len(page)))
        self.read[type(action).__name__, str(state.residency)] += 1
        return row, slots


@pytest.mark.parametrize(
    ("codec", "examples"),
    [("", 12), pytest.param(PLANES, 5, marks=pytest.mark.extended)],
)
def test_whatever_a_forward_reads_is_whole_pages(codec, examples):
    seen = Counter()

    @settings(deadline=None, max_examples=examples, derandomize=True)
    @given(st.lists(STEP, min_size=15, max_size=40))
    def histories(steps):
        engine = PagedEngine(slots=120, codec=codec)
        try:
            history = History(engine)
            for step in steps:
                history.step(*step)
            seen.update(engine.read)
        finally:
            engine.placement.handles.transfers.close()

    histories()
    assert sum(seen.values()) > 10
    assert {action for action, _ in seen} == {"Plain", "Draft", "Verify"}
