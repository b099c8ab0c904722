"""A complement is verified over once all of it is staged; what fails is told once."""

import pytest
from arriving import (
    GEOMETRY,
    LAYERS,
    ROOM,
    SLOTS,
    reloading,
    until,
)

from vericache_sglang.engine.reloads import Progress
from vericache_sglang.errors import InvariantError

FAILED, TRAVELLING, ARRIVED = Progress
NBYTES = SLOTS * GEOMETRY.token_bytes


def arrive(world, *rids):
    """Let copies of requests arrive; return what is told of them."""
    world.allow(*range(LAYERS))
    until(lambda: TRAVELLING not in world.reloads.progress())
    assert world.reloads.poll() == (list(rids), [])


def test_a_reload_travels_until_its_last_layer_is_here():
    with reloading() as world:
        world.keep("a")
        assert world.start("a") == NBYTES
        for layer in range(LAYERS):
            assert world.reloads.progress() == [TRAVELLING]
            with pytest.raises(InvariantError, match="without its complement"):
                world.reloads.spans("a")
            world.allow(layer)
        until(lambda: world.reloads.progress() == [ARRIVED])
        assert world.reloads.poll([TRAVELLING]) == ([], []), "another rank has less"
        with pytest.raises(InvariantError, match="without its complement"):
            world.reloads.spans("a")
        assert world.counters.staged_bytes == 0
        assert world.reloads.poll([ARRIVED]) == (["a"], [])
        assert world.reloads.poll([ARRIVED]) == ([], [])
        assert world.read("a") == world.bits("a")
        assert world.counters.staged_bytes == NBYTES
        (record,) = world.link.drain()
        assert (record.rid, record.nbytes) == ("a", NBYTES)


@pytest.mark.parametrize("damaged", range(LAYERS))
def test_a_damaged_layer_fails_the_reload_and_it_can_be_made_again(damaged):
    with reloading() as world:
        world.keep("a")
        world.damage("a", damaged)
        world.start("a")
        world.allow(*range(LAYERS))
        until(lambda: world.reloads.progress() == [FAILED])
        assert world.reloads.poll() == ([], ["a"])
        assert world.reloads.poll() == ([], [])
        assert (world.reloads.region.used, world.reloads.keys) == (0, set())
        counts = world.counters
        assert (counts.failed_reloads, counts.staged_bytes) == (1, 0)
        world.damage("a", damaged)
        world.start("a")
        world.allow(*range(LAYERS))
        arrive(world, "a")
        assert world.read("a") == world.bits("a")


def test_what_shares_a_failed_copy_fails_with_it_and_others_do_not():
    with reloading() as world:
        made = world.keep("a")
        world.host.adopt("b", "shared", made)
        world.keep("c", seed=3)
        world.damage("a", 2)
        for rid, key in (("a", "k"), ("b", "k"), ("c", "c")):
            world.start(rid, key)
        world.allow(*range(LAYERS), *range(LAYERS))
        until(lambda: world.reloads.progress() == [FAILED, ARRIVED])
        assert world.reloads.poll() == (["c"], ["a", "b"])
        assert world.read("c") == world.bits("c")


def test_what_fails_on_another_rank_fails_here_too():
    with reloading() as world:
        world.keep("a")
        world.start("a")
        world.allow(*range(LAYERS))
        until(lambda: world.reloads.progress() == [ARRIVED])
        assert world.reloads.poll([FAILED]) == ([], ["a"])
        assert world.reloads.region.used == 0


def test_a_request_that_leaves_stops_its_copy():
    with reloading() as world:
        world.keep("a")
        world.start("a")
        world.allow(0)
        until(lambda: world.keys[0].any())
        world.allow(1)
        world.reloads.end("a")
        assert world.reloads.region.used == 0
        for buffer in (*world.keys, *world.values):
            buffer.zero_()
        world.allow(2, 3)
        world.transfers.close()  # waits for what still runs
        assert not any(buffer.any() for buffer in (*world.keys, *world.values))


@pytest.mark.parametrize("late", [False, True])
def test_requests_that_share_a_complement_share_its_copy(late):
    with reloading() as world:
        world.keep("a")
        world.start("a")
        if late:
            arrive(world, "a")
        world.host.adopt("b", "shared", world.host.complement("a"))
        assert world.start("b", "a") == 0
        assert world.counters.shared_reloads == 1
        if late:
            assert world.reloads.poll() == (["b"], [])
        else:
            arrive(world, "a", "b")
        assert world.read("a") == world.read("b") == world.bits("a")
        world.reloads.end("a")
        assert world.reloads.region.used == SLOTS, "b has not let go"
        assert world.read("b") == world.bits("b")
        world.reloads.end("b")
        assert world.reloads.region.used == 0


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
