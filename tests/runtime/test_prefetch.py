"""A complement is verified over once all of it is staged; what fails is told once."""

import pytest
from arriving import (
    GEOMETRY,
    LAYERS,
    ROOM,
    SLOTS,
    prefetching,
    until,
)

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.prefetch import Progress

FAILED, TRAVELLING, ARRIVED = Progress
NBYTES = SLOTS * GEOMETRY.token_bytes


def arrive(world, *rids):
    """Let copies of requests arrive; return what is told of them."""
    world.allow(*range(LAYERS))
    until(lambda: TRAVELLING not in world.prefetches.progress())
    assert world.prefetches.poll() == (list(rids), [])


def test_a_prefetch_travels_until_its_last_layer_is_here():
    with prefetching() as world:
        world.keep("a")
        assert world.start("a") == NBYTES
        for layer in range(LAYERS):
            assert world.prefetches.progress() == [TRAVELLING]
            with pytest.raises(InvariantError, match="without its residual KV"):
                world.prefetches.spans("a")
            world.allow(layer)
        until(lambda: world.prefetches.progress() == [ARRIVED])
        assert world.prefetches.poll([TRAVELLING]) == ([], []), "another rank has less"
        with pytest.raises(InvariantError, match="without its residual KV"):
            world.prefetches.spans("a")
        assert world.counters.staged_bytes == 0
        assert world.prefetches.poll([ARRIVED]) == (["a"], [])
        assert world.prefetches.poll([ARRIVED]) == ([], [])
        assert world.read("a") == world.bits("a")
        assert world.counters.staged_bytes == NBYTES
        (record,) = world.link.drain()
        assert (record.rid, record.nbytes) == ("a", NBYTES)


@pytest.mark.parametrize("damaged", range(LAYERS))
def test_a_damaged_layer_fails_the_prefetch_and_it_can_be_made_again(damaged):
    with prefetching() as world:
        world.keep("a")
        world.damage("a", damaged)
        world.start("a")
        world.allow(*range(LAYERS))
        until(lambda: world.prefetches.progress() == [FAILED])
        assert world.prefetches.poll() == ([], ["a"])
        assert world.prefetches.poll() == ([], [])
        assert (world.prefetches.region.used, world.prefetches.keys) == (0, set())
        counts = world.counters
        assert (counts.failed_prefetches, counts.staged_bytes) == (1, 0)
        world.damage("a", damaged)
        world.start("a")
        world.allow(*range(LAYERS))
        arrive(world, "a")
        assert world.read("a") == world.bits("a")


def test_what_shares_a_failed_copy_fails_with_it_and_others_do_not():
    with prefetching() as world:
        made = world.keep("a")
        world.host.adopt("b", "shared", made)
        world.keep("c", seed=3)
        world.damage("a", 2)
        for rid, key in (("a", "k"), ("b", "k"), ("c", "c")):
            world.start(rid, key)
        world.allow(*range(LAYERS), *range(LAYERS))
        until(lambda: world.prefetches.progress() == [FAILED, ARRIVED])
        assert world.prefetches.poll() == (["c"], ["a", "b"])
        assert world.read("c") == world.bits("c")


def test_what_fails_on_another_rank_fails_here_too():
    with prefetching() as world:
        world.keep("a")
        world.start("a")
        world.allow(*range(LAYERS))
        until(lambda: world.prefetches.progress() == [ARRIVED])
        assert world.prefetches.poll([FAILED]) == ([], ["a"])
        assert world.prefetches.region.used == 0


def test_a_request_that_leaves_stops_its_copy():
    with prefetching() as world:
        world.keep("a")
        world.start("a")
        world.allow(0)
        until(lambda: world.keys[0].any())
        world.allow(1)
        world.prefetches.end("a")
        assert world.prefetches.region.used == 0
        for buffer in (*world.keys, *world.values):
            buffer.zero_()
        world.allow(2, 3)
        world.transfers.close()  # waits for what still runs
        assert not any(buffer.any() for buffer in (*world.keys, *world.values))


@pytest.mark.parametrize("late", [False, True])
def test_requests_that_share_a_residual_share_its_copy(late):
    with prefetching() as world:
        world.keep("a")
        world.start("a")
        if late:
            arrive(world, "a")
        world.host.adopt("b", "shared", world.host.residual("a"))
        assert world.start("b", "a") == 0
        assert world.counters.shared_prefetches == 1
        if late:
            assert world.prefetches.poll() == (["b"], [])
        else:
            arrive(world, "a", "b")
        assert world.read("a") == world.read("b") == world.bits("a")
        world.prefetches.end("a")
        assert world.prefetches.region.used == SLOTS, "b has not let go"
        assert world.read("b") == world.bits("b")
        world.prefetches.end("b")
        assert world.prefetches.region.used == 0


def test_the_speed_that_is_reported_is_that_of_the_last_copies():
    with prefetching(gbps=1e-3, held=False) as world:
        assert world.link.rate("in") == world.link.rate("out") == 0.0
        for turn in range(3):
            rid = f"r{turn}"
            world.keep(rid)
            world.start(rid)
            until(lambda rid=rid: world.prefetches.poll() == ([rid], []))
            world.prefetches.end(rid)
        world.prefetches.poll()
        counts = world.counters
        achieved = 3 * NBYTES / counts.prefetch_seconds
        assert counts.link_in_bytes_per_s == pytest.approx(achieved)
        assert 0 < achieved <= 1.01e6, "the link carries 1 MB/s"
        assert counts.link_out_bytes_per_s == 0.0
        assert world.prefetches.region.free == ROOM
