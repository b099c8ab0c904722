"""Rows with codes among others: which entries and tokens are theirs, and in graphs.

The truth is a list comprehension over the table. Their attention is in
``interpreted_cuda_backend.py``.
"""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_world import coded_rows

from vericache_kernels.ragged_attention import RaggedRows
from vericache_sglang.attention.packed_rows import coded_forward


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 4)), min_size=1
    ),
    dummies=st.integers(0, 2),
    spare=st.integers(0, 3),
    room=st.integers(0, 4),
)
def test_coded_rows_are_parted_from_the_others(rows, dummies, spare, room):
    """Rows: slots of codes, entries behind them, query tokens."""
    counts = [n for _, _, n in rows]
    most = max((n for codes, _, n in rows if codes), default=1)
    ends = [
        codes + max(n, entries)
        for (codes, entries, _), n in zip(rows, counts, strict=True)
    ]
    table = torch.arange(len(rows) * 20, dtype=torch.int32).view(-1, 20)
    pad = [0] * dummies
    places = RaggedRows(
        table,
        torch.tensor([*reversed(range(len(rows))), *pad]),
        torch.tensor([0, *counts, *pad]).cumsum(0),
        torch.zeros(len(rows) + dummies, dtype=torch.int64),
        torch.tensor([*ends, *pad]),
    )
    begins = [codes for codes, _, _ in rows]
    wanted = [
        table[len(rows) - 1 - r, begin:end].tolist() if begin else []
        for r, (begin, end) in enumerate(zip(begins, ends, strict=True))
    ]
    exact = sum(map(len, wanted)) + room
    tokens = sum(counts) + spare
    forward, others = coded_forward(coded_rows(begins, exact, most), places, tokens)
    listed = forward.slots.tolist()
    bounds = forward.first_slot.tolist()
    found = [listed[a:b] for a, b in pairwise(bounds)]
    assert found == [*wanted, *[[] for _ in pad]]
    assert len(forward.slots) == exact
    owners = [r for r, n in enumerate(counts) for _ in range(n)]
    assert forward.coded.tolist() == [
        *(begins[r] > 0 for r in owners),
        *[False] * spare,
    ]
    for token, r in enumerate(owners):
        assert forward.row_of[token] == r
        if begins[r]:
            assert forward.query[r, forward.place[token]] == token
            # The kernel gives the row's last token the last place.
            assert forward.place[token] - most == token - sum(counts[: r + 1])
            first = sum(counts[:r])
            assert set(forward.query[r].tolist()) == {*range(first, first + counts[r])}
    coded = [begin > 0 for begin in begins]
    assert others.end[: len(rows)].tolist() == [
        0 if is_coded else end for is_coded, end in zip(coded, ends, strict=True)
    ]
    segments = [int(is_coded) for is_coded in coded] + pad
    assert forward.segments.diff().tolist() == segments
