"""Sizes of captured graphs: every mixed batch fits one, little is added, few there are.

Held by enumeration on small servers and by hypothesis on large ones. A graph has as
many rows as tokens, but no more than a full server (SGLang's runner).
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.planning.graph_sizes import STEP, graph_tokens

SERVER = st.tuples(st.integers(1, 512), st.integers(1, 256), st.integers(1, 64))


def most_of(server):
    running, drafts, verifies = server
    return running + min(verifies, running) * drafts


def fitting(server, lengths):
    """Return the tokens of the graph that is taken; None: it runs without."""
    tokens, running = sum(lengths), server[0]
    found = next((n for n in graph_tokens(*server) if n >= tokens), None)
    return found if found and min(found, running) >= len(lengths) else None


@st.composite
def servers_and_batches(draw):
    running, drafts, verifies = server = draw(SERVER)
    together = draw(st.integers(0, min(verifies, running)))
    others = draw(st.integers(0, running - together))
    lengths = [draw(st.integers(1, drafts + 1)) for _ in range(together)]
    lengths += [1] * others
    return server, draw(st.permutations(lengths or [1]))


@given(servers_and_batches())
def test_every_batch_fits_and_little_is_added(case):
    server, lengths = case
    tokens, own = fitting(server, lengths), sum(lengths)
    assert tokens is not None
    assert own <= tokens < max(2 * own, 2) or own > STEP
    assert tokens < max(own + STEP, own * 5 / 4 + STEP)


@given(SERVER)
def test_the_list_is_short_and_ends_with_the_largest_batch(server):
    sizes, most = graph_tokens(*server), most_of(server)
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)
    assert all(n % STEP == 0 for n in sizes[:-1] if n >= STEP)
    # 5 that double, 4 steps up to 128, then a quarter more, rounded down to a step.
    assert len(sizes) <= 11 + max(0.0, math.log(most / 128) / math.log(8 / 7))
    # SGLang packs a captured batch's tokens in rows of at most d + 1.
    running, width = server[0], server[1] + 1
    assert all(n <= min(n, running) * width for n in sizes)


@pytest.mark.parametrize("server", [(1, 1, 1), (3, 2, 2), (5, 3, 1), (4, 1, 9)])
def test_every_batch_of_a_small_server_has_a_graph(server):
    running, drafts, verifies = server
    for rows in range(1, running + 1):
        for together in range(min(verifies, rows) + 1):
            for drafted in range(1, drafts + 1):
                lengths = [1 + drafted] * together + [1] * (rows - together)
                assert fitting(server, lengths) is not None


@pytest.mark.parametrize("together", [0, 1, 2])
def test_a_full_server_wastes_less_than_one_verification(together):
    lengths = [32] * together + [1] * (64 - together)
    assert fitting((64, 31, 2), lengths) - sum(lengths) < 32


def test_the_default_server_has_few_graphs():
    assert graph_tokens(64, 31, 2) == (1, 2, 4, 8, 16, 32, 64, 96, 126)


def test_more_than_was_planned_for_runs_without_a_graph():
    assert fitting((8, 4, 1), [1] * 9) is None, "too many rows"
    assert fitting((8, 4, 1), [5] * 8 + [1]) is None, "too many tokens"


@pytest.mark.parametrize("place", range(3))
def test_numbers_below_one_are_refused_by_name(place):
    names = ("max_running", "draft_length", "max_verifies")
    numbers = dict.fromkeys(names, 4) | {names[place]: 0}
    with pytest.raises(ValueError, match=f"{names[place]} must be at least 1"):
        graph_tokens(*numbers.values())
