"""What a text may go on with: by plain loops, on a CPU, by the kernel.

The kernel runs in a process of its own, see ``kernel_device``: this file as a script.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import moved, report, run, unsynced

from vericache_kernels.suffix_match import (
    LONGEST,
    NONE,
    Corpus,
    TextRows,
    bytes_read,
    suffix_match,
)
from vericache_kernels.suffix_match.ref import match_rows

PARTS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 39), st.integers(0, 14)), max_size=8
)
"""Row, beginning and tokens of documents that are parts of texts."""


@st.composite
def searches(draw):
    """Draw texts and a ring; with few token ids much matches in the own text."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    width, ids = draw(st.integers(1, 40)), draw(st.sampled_from([3, 30]))
    texts = torch.randint(0, ids, (7, width), generator=random, dtype=torch.int32)
    count = draw(st.integers(0, 4))
    lengths = draw(st.lists(st.integers(0, width), min_size=count, max_size=count))
    rows = TextRows(
        texts,
        torch.randperm(7, generator=random)[:count],
        torch.tensor(lengths, dtype=torch.int64),
        torch.randint(0, 2, (count,), generator=random),
    )
    size, end = draw(st.sampled_from([0, 1, 7, 30, 60])), 0
    ring = torch.full([size], NONE, dtype=torch.int32)
    for row, start, count in draw(PARTS) if size else ():
        document = texts[row, start : start + count].tolist()
        for token in [*document[: size - 1], NONE]:
            ring[end] = token
            end = (end + 1) % size
    return rows, Corpus(ring, torch.tensor([end])), draw(st.integers(1, 5))


def by_hand(rows, corpus, depth):
    """Text by text and place by place."""
    shift = int(corpus.end)
    ring = corpus.tokens.tolist()
    ring, found = ring[shift:] + ring[:shift], []
    for pool_idx, length, shared in zip(
        rows.pool_idx.tolist(), rows.length.tolist(), rows.shared.tolist(), strict=True
    ):
        text = rows.text[pool_idx, :length].tolist()
        best = max(
            *((run_of(text, text, end), 1, end) for end in range(length - 1)),
            *((run_of(text, ring, end), 0, end) for end in range(len(ring) * shared)),
            (0, 0, 0),
            (0, 0, 0),
        )
        matched, own, end = best
        after = []
        if matched and own:
            after = (text[end + 1 :] * depth)[:depth]
        elif matched:
            rest = ring[end + 1 :]
            after = rest[: rest.index(NONE)][:depth] if NONE in rest else rest[:depth]
        found.append(after + [NONE] * (depth - len(after)))
    return found


def run_of(text, tokens, end):
    """Return how many tokens up to ``end`` equal the text's last ones."""
    run = 0
    while run < min(LONGEST, len(text), end + 1):
        if tokens[end - run] != text[-1 - run]:
            break
        run += 1
    return run


@settings(max_examples=200, deadline=None)
@given(search=searches())
def test_the_best_match_is_the_one_found_by_hand(search):
    found = suffix_match(*search)
    assert found.dtype == torch.int64
    assert found.tolist() == by_hand(*search)


def sound(**changes):
    known = {
        "text": torch.zeros(3, 8, dtype=torch.int32),
        "pool_idx": torch.tensor([1, 0]),
        "length": torch.tensor([4, 8]),
        "shared": torch.tensor([0, 1]),
        "tokens": torch.zeros(5, dtype=torch.int32),
        "end": torch.tensor([2]),
        "depth": 2,
    } | changes
    depth, corpus = known.pop("depth"), Corpus(known.pop("tokens"), known.pop("end"))
    return TextRows(**known), corpus, depth


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"text": torch.zeros(8, dtype=torch.int32)}, "rows.text must have 2 dim"),
        ({"text": torch.zeros(8, 3, dtype=torch.int32).t()}, "contiguous, is"),
        ({"length": torch.tensor([4])}, "rows.length must have 2 entries, has 1"),
        ({"shared": torch.tensor([True, False])}, "rows.shared must be torch.int64"),
        ({"tokens": torch.zeros(5).long()}, "corpus.tokens must be torch.int32"),
        ({"end": torch.zeros(1, device="meta").long()}, "corpus.end is on meta"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        suffix_match(*sound(**changes))


def test_bytes_read_are_counted():
    assert bytes_read([4, 8], 5) == 4 * (4 + 8 + 2 * 5)


def test_the_kernel_equals_the_reference():
    seen = run(__file__)
    assert seen["own"] > 10
    assert seen["shared"] > 10


SEEN = {"own": 0, "shared": 0}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(search=searches())
def kernel_equals_reference(search):
    from vericache_kernels.suffix_match import triton_impl

    triton_impl.BLOCK = 16  # several of them in these short texts
    rows, corpus, depth = search
    expected = match_rows(*search)
    call = moved(rows), moved(corpus), depth
    with unsynced():
        found = triton_impl.launch(*call)
    assert torch.equal(found.cpu(), expected)
    alone = match_rows(
        dataclasses.replace(rows, shared=torch.zeros_like(rows.shared)), corpus, depth
    )
    SEEN["own"] += int((alone >= 0).any(1).sum())
    SEEN["shared"] += int((alone != expected).any(1).sum())


if __name__ == "__main__":
    kernel_equals_reference()
    report(SEEN)
