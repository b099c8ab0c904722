"""The staging buffer under random takes and gives, against a set of slots."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.staging import Lease, Span, StagingBuffer

STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 50)))


def slots_of(lease):
    return [slot for p in lease.pieces for slot in range(p.start, p.start + p.slots)]


def runs(slots):
    """Lengths of the runs of consecutive numbers."""
    lengths, last = [], None
    for slot in sorted(slots):
        if last is not None and slot == last + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
        last = slot
    return lengths


def fewest(lengths, wanted):
    """How many runs it takes to hold ``wanted`` slots, by trying every subset."""
    sizes = range(1, len(lengths) + 1)
    return next(
        n for n in sizes if any(sum(c) >= wanted for c in combinations(lengths, n))
    )


@pytest.mark.parametrize("page", [1, 4, 16])
@given(steps=STEPS)
def test_a_take_succeeds_exactly_where_there_is_room(page, steps):
    region = StagingBuffer(96, 64, page)
    free, held = set(range(96, 160)), []
    for take, wanted, which in steps:
        if take:
            rounded = -(-wanted // page) * page
            lease = region.take(wanted)
            assert (lease is not None) == (rounded <= len(free))
            if lease is None:
                continue
            assert lease.slots == len(set(slots_of(lease))) == rounded
            assert len(lease.pieces) == fewest(runs(free), rounded)
            assert set(slots_of(lease)) <= free, "no slot is handed out twice"
            assert all(p.start % page == p.slots % page == 0 for p in lease.pieces)
            free -= set(slots_of(lease))
            held.append(lease)
        elif held:
            lease = held.pop(which % len(held))
            region.give(lease)
            free |= set(slots_of(lease))
        assert (region.free, region.used) == (len(free), 64 - len(free))
    for lease in held:
        region.give(lease)
    assert len(region.take(64).pieces) == 1, "neighbours are merged"


@given(steps=STEPS)
def test_equal_calls_give_equal_leases(steps):
    histories = []
    for _ in range(2):
        region, held, seen = StagingBuffer(8, 64, 4), [], []
        for take, wanted, which in steps:
            if take and (lease := region.take(wanted)):
                held.append(lease)
                seen.append(lease.pieces)
            elif not take and held:
                region.give(held.pop(which % len(held)))
        histories.append(seen)
    assert histories[0] == histories[1]


@pytest.mark.parametrize(
    ("wanted", "pieces"),
    [
        (3, [(8, 3)]),
        (4, [(8, 4)]),
        (5, [(0, 5)]),
        (9, [(0, 6), (8, 3)]),
        (11, [(0, 6), (24, 5)]),
        (13, [(0, 6), (8, 1), (24, 6)]),
        (16, [(0, 6), (8, 4), (24, 6)]),
        (17, None),
    ],
)
def test_the_pieces_of_a_fragmented_region(wanted, pieces):
    """Free spans of 6, 4 and 6 slots, at 0, 8 and 24."""
    region = StagingBuffer(0, 30)
    sizes = [6, 2, 4, 12, 6]
    leases = [region.take(size) for size in sizes]
    assert [lease.pieces[0].slots for lease in leases] == sizes
    for i in (0, 2, 4):
        region.give(leases[i])
    lease = region.take(wanted)
    found = lease and [(piece.start, piece.slots) for piece in lease.pieces]
    assert found == pieces


@pytest.mark.parametrize(
    ("slots", "spans"),
    [(1, [(4, 1)]), (4, [(4, 4)]), (6, [(4, 4), (16, 2)]), (12, [(4, 4), (16, 8)])],
)
def test_the_first_slots_of_a_lease(slots, spans):
    lease = Lease((Span(4, 4), Span(16, 8)))
    assert [(s.start, s.slots) for s in lease.first(slots)] == spans


def test_a_lease_has_no_more_slots_than_it_has():
    with pytest.raises(InvariantError, match="13 slots in a lease of 12"):
        Lease((Span(4, 12),)).first(13)


def test_giving_back_twice_is_an_error_even_when_the_slots_are_leased_again():
    region = StagingBuffer(0, 10)
    lease = region.take(4)
    region.give(lease)
    with pytest.raises(InvariantError, match="freed twice"):
        region.give(lease)
    again = region.take(4)
    assert again.pieces == lease.pieces
    with pytest.raises(InvariantError, match="freed twice"):
        region.give(lease)
    assert region.used == 4
    region.give(again)
    assert len(region.take(10).pieces) == 1


def test_an_empty_region_stages_nothing():
    assert StagingBuffer(7, 0).take(1) is None


def test_a_broken_last_page_is_never_leased():
    region = StagingBuffer(16, 40, 16)
    assert (region.slots, region.free) == (32, 32)
    assert region.take(33) is None
    assert region.take(32).pieces == (Span(16, 32),)


def test_a_region_begins_at_a_page():
    with pytest.raises(InvariantError, match="starts at slot 7, pages are 4"):
        StagingBuffer(7, 64, 4)


def test_a_lease_of_nothing_is_an_error():
    with pytest.raises(InvariantError, match="a lease of 0 slots"):
        StagingBuffer(0, 64).take(0)
