"""Sizes of captured graphs: every mixed batch fits one, little is added, few there are.

Held by enumeration on small servers and by hypothesis on large ones.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.engine.capture_sizes import (
    EAGER_COUNTER,
    STEADY_MIXES,
    CaptureSize,
    PaddedRows,
    capture_sizes,
    fitting_size,
    padded_rows,
)

SERVER = st.tuples(st.integers(1, 512), st.integers(1, 256), st.integers(1, 64))


@st.composite
def servers_and_batches(draw):
    running, drafts, verifies = server = draw(SERVER)
    together = draw(st.integers(0, min(verifies, running)))
    others = draw(st.integers(0, running - together))
    lengths = [draw(st.integers(1, drafts + 1)) for _ in range(together)]
    lengths += [1] * others
    return server, draw(st.permutations(lengths or [1]))


@settings(max_examples=60, deadline=None)
@given(servers_and_batches(), st.booleans())
def test_every_batch_fits_and_less_than_a_quarter_is_added(case, rounded):
    (running, drafts, verifies), lengths = case
    multiple = drafts + 1 if rounded else 1
    sizes = capture_sizes(running, drafts, verifies, multiple=multiple)
    size = fitting_size(sizes, lengths)
    assert size is not None
    own = sum(lengths)
    assert size.tokens >= own
    assert size.rows >= len(lengths)
    assert size.tokens % multiple == 0
    assert size.tokens - own < own / 4 + multiple
    # SGLang packs a captured batch's tokens in rows of at most d + 1.
    assert all(s.rows <= s.tokens <= s.rows * (drafts + 1) for s in sizes)


@settings(max_examples=60, deadline=None)
@given(SERVER)
def test_the_list_is_short_ascending_and_ends_with_the_largest_batch(server):
    running, drafts, verifies = server
    together = min(verifies, running)
    most = running + together * drafts
    sizes = capture_sizes(*server)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == CaptureSize(most, running)
    # 8 sizes up to 8; then a quarter more, rounded down, is at least a fifth more.
    ladder = 8 + max(0.0, math.log(most / 8) / math.log(1.2))
    assert len(sizes) <= ladder + 2 + STEADY_MIXES


@settings(max_examples=60, deadline=None)
@given(servers_and_batches())
def test_a_padded_batch_has_the_size_s_rows_and_tokens(case):
    server, lengths = case
    size = fitting_size(capture_sizes(*server), lengths)
    padded = padded_rows(lengths, size)
    assert padded.lengths[: len(lengths)] == tuple(lengths)
    assert set(padded.lengths[len(lengths) :]) <= {0}
    assert len(padded.lengths) == size.rows
    assert sum(padded.lengths) + padded.spare == size.tokens


@pytest.mark.parametrize("server", [(1, 1, 1), (3, 2, 2), (5, 3, 1), (4, 1, 9)])
def test_every_batch_of_a_small_server_takes_the_nearest_size(server):
    running, drafts, verifies = server
    sizes = capture_sizes(*server)
    for rows in range(1, running + 1):
        for together in range(min(verifies, rows) + 1):
            for drafted in range(1, drafts + 1):
                lengths = [1 + drafted] * together + [1] * (rows - together)
                best = min(s.tokens for s in sizes if s.tokens >= sum(lengths))
                assert fitting_size(sizes, lengths).tokens == best


@pytest.mark.parametrize("together", [0, 1, 2])
def test_a_full_server_wastes_nothing(together):
    sizes = capture_sizes(64, 32, 2)
    lengths = [33] * together + [1] * (64 - together)
    assert fitting_size(sizes, lengths) == CaptureSize(64 + 32 * together, 64)
    assert padded_rows(lengths, CaptureSize(64 + 32 * together, 64)).spare == 0


def test_more_than_was_planned_for_runs_without_a_graph():
    sizes = capture_sizes(8, 4, 1)
    assert fitting_size(sizes, [1] * 9) is None, "too many rows"
    assert fitting_size(sizes, [5, 5, *[1] * 6]) is None, "too many tokens"
    assert fitting_size((), [1]) is None
    assert EAGER_COUNTER.isidentifier()


def test_what_does_not_fit_is_not_padded():
    size = CaptureSize(4, 2)
    assert padded_rows([2], size) == PaddedRows((2, 0), 2)
    for lengths in ([1, 1, 1], [3, 2], [1, 0]):
        with pytest.raises(ValueError, match="do not fit"):
            padded_rows(lengths, size)


@pytest.mark.parametrize("place", range(4))
def test_numbers_below_one_are_refused_by_name(place):
    names = ("max_running", "draft_length", "max_verifies", "multiple")
    numbers = dict.fromkeys(names, 4) | {names[place]: 0}
    with pytest.raises(ValueError, match=f"{names[place]} must be at least 1"):
        capture_sizes(
            numbers["max_running"],
            numbers["draft_length"],
            numbers["max_verifies"],
            multiple=numbers["multiple"],
        )
