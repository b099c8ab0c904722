"""The modelled machine: rates, the serial link, counted room, the clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import ConfigError, InvariantError
from vericache_sglang.scheduling.iteration_model import Work
from vericache_sglang.simulation.costs import Costs
from vericache_sglang.simulation.link import SerialLink
from vericache_sglang.simulation.machine import SimulatedMachine
from vericache_sglang.simulation.room import Room, SharedRoom


def costs(**changes):
    fields = {
        "memory_bytes": 2000.0,
        "weight_bytes": 1000.0,
        "token_bytes": 10,
        "hbm_bytes_per_s": 100.0,
        "flops_per_s": 50.0,
        "flops_per_token": 5.0,
        "flops_per_product": 1.0,
        "overhead_s": 0.5,
        "link_bytes_per_s": 20.0,
        "link_latency_s": 0.0,
    }
    return Costs(**{**fields, **changes})


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        # (1000 + 10 slots x 10 bytes) / 100 bytes/s against (5 + 10) / 50.
        (Work(tokens=1, reads=10, products=10), 11.0 + 0.5),
        # Arithmetic is longer: (100 x 5 + 1000) / 50 = 30 against 11.
        (Work(tokens=100, reads=10, products=1000), 30.0 + 0.5),
    ],
)
def test_a_forward_takes_its_reads_or_its_arithmetic(work, seconds):
    assert costs().forward_s(work) == pytest.approx(seconds)


def test_slots_are_what_the_weights_leave():
    assert costs(memory_bytes=1039).slots == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"link_bytes_per_s": 0.0}, "link_bytes_per_s"),
        ({"hbm_bytes_per_s": -1.0}, "hbm_bytes_per_s"),
        ({"memory_bytes": 1005.0}, "no room for KV"),
    ],
)
def test_impossible_machines_are_refused(change, named):
    with pytest.raises(ConfigError, match=named):
        costs(**change)


def test_copies_wait_for_each_other_and_for_their_source():
    link = SerialLink(bytes_per_s=10.0, latency_s=1.0)
    first = link.book(0.0, 50)
    second = link.book(2.0, 10)
    third = link.book(2.0, 10, after=20.0)
    assert [(c.start, c.end) for c in (first, second, third)] == [
        (0.0, 6.0),
        (6.0, 8.0),
        (20.0, 22.0),
    ]
    assert [link.busy_s(now) for now in (8.0, 21.0, 30.0)] == [8.0, 9.0, 10.0]


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1000)), min_size=1))
def test_the_link_carries_one_copy_at_a_time(asked):
    link, now = SerialLink(bytes_per_s=100.0, latency_s=0.01), 0.0
    for wait, size in asked:
        now += wait
        assert link.book(now, size).start >= now
    ends = [0.0, *(copy.end for copy in link.copies)]
    assert all(copy.start >= end for copy, end in zip(link.copies, ends, strict=False))
    total = sum(size for _, size in asked) / 100.0 + 0.01 * len(asked)
    assert link.busy_s(link.free_at) == pytest.approx(total)


def test_room_is_never_below_nothing_nor_above_its_total():
    room = Room("pool", 10)
    room.take(10)
    with pytest.raises(InvariantError, match="pool: 1 of 0"):
        room.take(1)
    room.give(10)
    with pytest.raises(InvariantError, match="pool: 1 of 0"):
        room.give(1)
    assert (room.used, room.peak) == (0, 10)


def test_a_shared_residual_is_held_once_and_until_its_last_user_leaves():
    room = SharedRoom("host", 10)
    assert room.join("g", "a", 8)
    assert not room.join("g", "b", 8)
    assert room.fits("g", 8)
    assert not room.fits("h", 8)
    room.leave("g", "a")
    room.leave("g", "stranger")
    assert room.used == 8
    room.leave("g", "b")
    assert room.used == 0


def test_events_happen_in_order_of_time_then_of_asking():
    machine = SimulatedMachine(costs(), staging_slots=20, host_slots=0)
    seen = []
    for when, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        machine.at(when, lambda n=name: seen.append((n, machine.now)))
    machine.advance(1.5)
    assert seen == [("first", 1.0), ("second", 1.0)]
    assert machine.next_event() == 2.0
    machine.advance(3.0)
    assert seen[-1] == ("late", 2.0)
    assert machine.now == 3.0


def test_slots_on_their_way_to_the_host_are_still_held():
    machine = SimulatedMachine(costs(), staging_slots=20, host_slots=0)
    assert machine.pool.total == 80
    machine.pool.take(5)
    machine.give_at(4.0, 5)
    machine.advance(3.9)
    assert machine.pool.used == 5
    machine.advance(4.0)
    assert machine.pool.used == 0
