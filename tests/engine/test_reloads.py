"""A verification may begin before its complement is whole, and emits nothing wrong."""

import time

import pytest
from arriving import (
    GEOMETRY,
    LAYERS,
    ROOM,
    SLOTS,
    reloading,
    until,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.engine.reloads import Progress
from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.thread_transfers import ThreadTransfer

FAILED, TRAVELLING, ARRIVING, ARRIVED = Progress
NBYTES = SLOTS * GEOMETRY.token_bytes
LONG_S = 1e3
"""An iteration for which any stall is worth it."""


def verify(world, *rids):
    """Launch a forward that verifies requests; return what its layers read, by rid."""
    gate = world.reloads.gate(rids)
    slots = {rid: world.slots(rid) for rid in rids}
    read = {rid: [] for rid in rids}
    with gate.over(world):
        for layer in range(LAYERS):
            for rid in rids:
                read[rid].append(world.read(layer, slots[rid]))
    return read, world.reloads.thrown(gate, rids)


def opened(world, rid="a", layers=1):
    """Start a reload and let a verification over it start."""
    world.keep(rid)
    world.start(rid)
    world.allow(*range(layers))
    world.wait(layers)
    assert world.reloads.poll(world.reloads.progress(LONG_S)) == ([rid], [])


# -- how far a reload is -------------------------------------------------------


def test_without_an_iterations_time_no_reload_is_arriving():
    """As under CUDA graphs: a replay cannot wait for a layer."""
    with reloading() as world:
        world.keep("a")
        assert world.start("a") == NBYTES
        for layer in range(LAYERS):
            assert world.reloads.progress() == [TRAVELLING]
            world.allow(layer)
            world.wait(layer + 1)
        until(lambda: world.reloads.progress() == [ARRIVED])
        assert world.reloads.poll() == (["a"], [])
        assert world.reloads.poll() == ([], [])


def test_a_reload_of_which_nothing_is_here_is_not_arriving():
    with reloading() as world:
        world.keep("a")
        world.start("a")
        assert world.reloads.progress(LONG_S) == [TRAVELLING]
        with pytest.raises(InvariantError, match="without its complement"):
            world.reloads.spans("a")


def test_it_is_arriving_when_all_ranks_say_so_and_stays_so():
    with reloading() as world:
        world.keep("a")
        world.start("a")
        world.allow(0)
        world.wait(1)
        assert world.reloads.progress(LONG_S) == [ARRIVING]
        assert world.reloads.poll([TRAVELLING]) == ([], [])
        assert world.reloads.progress() == [TRAVELLING], "nothing was agreed on"
        with pytest.raises(InvariantError, match="without its complement"):
            world.reloads.spans("a")
        assert world.reloads.poll([ARRIVING]) == (["a"], [])
        assert len(world.slots("a")) == SLOTS
        assert world.reloads.progress() == [ARRIVING]
        assert world.reloads.poll([ARRIVING]) == ([], [])
        world.allow(1, 2, 3)
        until(lambda: world.reloads.progress() == [ARRIVED])
        assert world.reloads.poll([ARRIVING]) == ([], []), "another rank has less"
        assert world.counters.staged_bytes == 0
        assert world.reloads.poll([ARRIVED]) == ([], [])
        assert world.counters.staged_bytes == NBYTES


@pytest.mark.parametrize(("rows", "early"), [(1, True), (10**6, False)])
def test_the_whole_batch_stands_still_for_one_verification(rows, early):
    with reloading() as world:
        world.keep("a")
        world.start("a")
        time.sleep(0.02)  # the pace of the layers to come, 3 of them
        world.allow(0)
        world.wait(1)
        wanted = ARRIVING if early else TRAVELLING
        assert world.reloads.progress(1.0, rows) == [wanted]


# -- a forward over layers that are arriving -----------------------------------


@settings(max_examples=25)
@given(
    copy_ms=st.lists(st.integers(0, 6), min_size=LAYERS, max_size=LAYERS),
    forward_ms=st.lists(st.integers(0, 6), min_size=LAYERS, max_size=LAYERS),
    gbps=st.sampled_from([0.0, 1e-3, 3e-4]),
)
def test_every_layer_reads_the_complement_whoever_is_faster(copy_ms, forward_ms, gbps):
    with reloading(gbps, held=False) as world:
        world.delays = [ms / 1e3 for ms in copy_ms]
        world.keep("a", seed=sum(copy_ms))
        world.start("a")
        arrived, began = [], time.monotonic()
        while not arrived:
            assert time.monotonic() < began + 20
            arrived, failed = world.reloads.poll(world.reloads.progress(LONG_S))
            assert not failed
        slots = world.slots("a")
        gate = world.reloads.gate(["a"])
        with gate.over(world):
            for layer in range(LAYERS):
                time.sleep(forward_ms[layer] / 1e3)
                assert world.read(layer, slots) == world.bits("a", layer)
        assert world.layer_transfer_counter is None
        assert world.reloads.thrown(gate, ["a"]) == set()
        world.reloads.end("a")
        assert world.reloads.region.used == 0
        until(lambda: world.reloads.poll() == ([], []) and world.counters.staged_bytes)
        assert world.counters.staged_bytes == NBYTES
        assert world.counters.stage_seconds > 0
        assert world.counters.thrown_verifications == 0
        (record,) = world.link.drain()
        assert (record.rid, record.nbytes) == ("a", NBYTES)


def test_slots_are_given_back_at_once_and_bytes_count_when_they_are_there(monkeypatch):
    """On a GPU the forward is launched long before its copies have ended."""
    with reloading() as world:
        opened(world)
        world.allow(1, 2, 3)
        read, thrown = verify(world, "a")
        assert thrown == set()
        assert read["a"] == [world.bits("a", layer) for layer in range(LAYERS)]
        world.reloads.end("a")
        assert (world.reloads.region.used, world.reloads.keys) == (0, set())
        assert world.counters.early_verifications == 1
        with monkeypatch.context() as patch:
            patch.setattr(ThreadTransfer, "done", lambda self: False)
            world.reloads.poll()
            assert world.counters.staged_bytes == 0
        until(lambda: world.reloads.poll() == ([], []) and world.counters.staged_bytes)
        assert world.counters.staged_bytes == NBYTES


def test_a_forward_that_waits_for_no_layer_is_found_out():
    """Its attention backend, or a graph, never asked the gate."""
    with reloading() as world:
        opened(world)
        gate = world.reloads.gate(["a"])
        with gate.over(world):
            for layer in range(LAYERS - 1):
                world.allow(layer + 1)
                world.read(layer, world.slots("a"))
        with pytest.raises(InvariantError, match=r"layer 2 last, of 4: its attention"):
            world.reloads.thrown(gate, ["a"])


def test_a_forward_over_what_has_arrived_asks_nobody():
    with reloading() as world:
        opened(world)
        world.allow(1, 2, 3)
        until(lambda: world.reloads.progress() == [ARRIVED])
        world.reloads.poll()
        world.reloads.gather = lambda values: pytest.fail("a gather too many")
        gate = world.reloads.gate(["a", "b"])
        assert gate.keys == ()
        assert world.reloads.thrown(gate, ["a", "b"]) == set()
        assert world.counters.early_verifications == 0


# -- what goes wrong -----------------------------------------------------------


@pytest.mark.parametrize("damaged", range(1, LAYERS))
def test_a_damaged_layer_throws_the_verification_away_and_is_tried_again(damaged):
    with reloading() as world:
        opened(world)
        slots = world.slots("a")
        world.damage("a", damaged)
        world.allow(*range(1, LAYERS))
        read, thrown = verify(world, "a")
        assert thrown == {"a"}
        for layer in range(damaged):
            assert read["a"][layer] == world.bits("a", layer)
        assert world.reloads.spans("a"), "nothing was given back yet"
        assert world.reloads.progress() == [FAILED]
        assert world.reloads.poll() == ([], ["a"])
        assert (world.reloads.region.used, world.reloads.keys) == (0, set())
        counts = world.counters
        assert (counts.early_verifications, counts.thrown_verifications) == (1, 1)
        assert (counts.failed_reloads, counts.staged_bytes) == (1, 0)
        world.damage("a", damaged)
        world.start("a")
        world.allow(*range(LAYERS))
        world.wait(1)
        world.reloads.poll(world.reloads.progress(LONG_S))
        read, thrown = verify(world, "a")
        assert thrown == set()
        assert world.slots("a") == slots
        assert read["a"] == [world.bits("a", layer) for layer in range(LAYERS)]


def test_who_shares_a_failed_copy_fails_with_it_and_others_do_not():
    with reloading() as world:
        made = world.keep("a")
        world.host.adopt("b", "shared", made)
        world.keep("c", seed=3)
        for rid, key in (("a", "k"), ("b", "k"), ("c", "c")):
            world.start(rid, key)
        world.allow(0, 0)
        world.damage("a", 2)
        world.allow(1, 2)
        shared, other = world.reloads._staged.values()
        until(shared.transfer._future.done)
        until(lambda: other.transfer.layers_done == 1)
        assert world.reloads.poll([ARRIVING, ARRIVING]) == (["a", "b", "c"], [])
        world.allow(1, 2, 3)
        read, thrown = verify(world, "b", "c")
        assert thrown == {"b"}
        assert read["c"] == [world.bits("c", layer) for layer in range(LAYERS)]
        world.reloads.end("c")
        assert world.reloads.poll(world.reloads.progress()) == ([], ["a", "b"])
        assert world.counters.early_verifications == 2
        assert world.counters.thrown_verifications == 1


def test_what_fails_on_another_rank_is_thrown_away_here_too():
    with reloading() as world:
        opened(world)
        world.allow(1, 2, 3)
        asked = []

        def gather(values):
            asked.append(list(values))
            return [list(values), [1.0], [0.0]]

        world.reloads.gather = gather
        read, thrown = verify(world, "a")
        assert (asked, thrown) == ([[0.0]], {"a"})
        assert read["a"] == [world.bits("a", layer) for layer in range(LAYERS)]
        until(lambda: world.reloads.progress() == [ARRIVED])
        assert world.reloads.poll([FAILED]) == ([], ["a"])
        assert world.reloads.region.used == 0


def test_a_request_that_leaves_stops_a_copy_no_forward_has_waited_for():
    with reloading() as world:
        opened(world)
        slots = world.slots("a")
        (staged,) = world.reloads._staged.values()
        world.allow(1)
        world.reloads.end("a")
        assert world.reloads.region.used == 0
        for buffers in (world.keys, world.values):
            for buffer in buffers:
                buffer[slots] = 0
        world.allow(2, 3)
        time.sleep(0.02)
        assert not any(b[slots].any() for b in (*world.keys, *world.values))
        assert staged.transfer.layers_done < LAYERS


def test_a_request_that_joins_what_is_arriving_may_be_verified_next():
    with reloading() as world:
        opened(world)
        world.host.adopt("b", "shared", world.host.complement("a"))
        assert world.start("b", "a") == 0
        assert world.reloads.poll(world.reloads.progress()) == (["b"], [])
        world.allow(1, 2, 3)
        read, thrown = verify(world, "a", "b")
        assert thrown == set()
        assert read["a"] == read["b"]
        world.reloads.end("a")
        assert world.reloads.region.used == SLOTS, "b has not let go"
        gate = world.reloads.gate(["b"])
        assert gate.keys == (), "the forward behind the first one sees every layer"
        world.reloads.end("b")
        assert world.reloads.region.used == 0


# -- what the link does --------------------------------------------------------


def test_the_speed_that_is_reported_is_that_of_the_last_copies():
    with reloading(gbps=1e-3, held=False) as world:
        assert world.link.rate("in") == world.link.rate("out") == 0.0
        for turn in range(3):
            rid = f"r{turn}"
            world.keep(rid)
            world.start(rid)
            until(lambda rid=rid: world.reloads.poll() == ([rid], []))
            world.reloads.end(rid)
        world.reloads.poll()
        counts = world.counters
        achieved = 3 * NBYTES / counts.stage_seconds
        assert counts.link_in_bytes_per_s == pytest.approx(achieved)
        assert 0 < achieved <= 1.01e6, "the link carries 1 MB/s"
        assert counts.link_out_bytes_per_s == 0.0
        assert world.reloads.region.free == ROOM
