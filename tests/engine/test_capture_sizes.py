"""Sizes of captured graphs: every mixed batch fits one, little is added, few there are.

Held by enumeration on small servers and by hypothesis on large ones. What a size serves
is taken from SGLang's runner: ``bs * (d + 1)`` tokens in ``min(tokens, max(bs))`` rows.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.engine.capture_sizes import STEADY_MIXES, batch_sizes

SERVER = st.tuples(st.integers(1, 512), st.integers(1, 256), st.integers(1, 64))


def captured(server):
    """Return (tokens, rows) of every graph, as SGLang captures them."""
    sizes, width = batch_sizes(*server), server[1] + 1
    return [(size * width, min(size * width, max(sizes))) for size in sizes]


def fitting(server, lengths):
    """Return the tokens of the graph SGLang takes; None: it runs without."""
    tokens, rows = sum(lengths), len(lengths)
    found = next((graph for graph in captured(server) if graph[0] >= tokens), None)
    return found[0] if found and found[1] >= rows else None


@st.composite
def servers_and_batches(draw):
    running, drafts, verifies = server = draw(SERVER)
    together = draw(st.integers(0, min(verifies, running)))
    others = draw(st.integers(0, running - together))
    lengths = [draw(st.integers(1, drafts + 1)) for _ in range(together)]
    lengths += [1] * others
    return server, draw(st.permutations(lengths or [1]))


@settings(max_examples=60, deadline=None)
@given(servers_and_batches())
def test_every_batch_fits_and_less_than_a_quarter_is_added(case):
    server, lengths = case
    tokens, own = fitting(server, lengths), sum(lengths)
    assert tokens is not None
    assert own <= tokens < own * 5 / 4 + server[1] + 1
    # SGLang packs a captured batch's tokens in rows of at most d + 1.
    assert all(rows <= n <= rows * (server[1] + 1) for n, rows in captured(server))


@settings(max_examples=60, deadline=None)
@given(SERVER)
def test_the_list_is_short_ascending_and_ends_with_the_rows_of_a_full_server(server):
    running, drafts, verifies = server
    sizes = batch_sizes(*server)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == running
    most = running + min(verifies, running) * drafts
    # 8 sizes up to 8; then a quarter more, rounded down, is at least a fifth more.
    ladder = 8 + max(0.0, math.log(most / 8) / math.log(1.2))
    assert len(sizes) <= ladder + 3 + STEADY_MIXES


@pytest.mark.parametrize("server", [(1, 1, 1), (3, 2, 2), (5, 3, 1), (4, 1, 9)])
def test_every_batch_of_a_small_server_has_a_graph(server):
    running, drafts, verifies = server
    for rows in range(1, running + 1):
        for together in range(min(verifies, rows) + 1):
            for drafted in range(1, drafts + 1):
                lengths = [1 + drafted] * together + [1] * (rows - together)
                assert fitting(server, lengths) is not None


@pytest.mark.parametrize("together", [0, 1, 2])
def test_a_full_server_wastes_less_than_one_round(together):
    lengths = [33] * together + [1] * (64 - together)
    assert fitting((64, 32, 2), lengths) - sum(lengths) < 33


def test_more_than_was_planned_for_runs_without_a_graph():
    assert fitting((8, 4, 1), [1] * 9) is None, "too many rows"
    assert fitting((8, 4, 1), [5] * 8 + [1]) is None, "too many tokens"


@pytest.mark.parametrize("place", range(3))
def test_numbers_below_one_are_refused_by_name(place):
    names = ("max_running", "draft_length", "max_verifies")
    numbers = dict.fromkeys(names, 4) | {names[place]: 0}
    with pytest.raises(ValueError, match=f"{names[place]} must be at least 1"):
        batch_sizes(*numbers.values())
