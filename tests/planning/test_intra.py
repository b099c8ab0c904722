"""Appendix A.1: each equation by hand, the search against trying everything."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.planning.acceptance import Geometric
from vericache_sglang.planning.hardware import Machine
from vericache_sglang.planning.intra import (
    InnerDrafter,
    IntraChoice,
    ServerModel,
    estimate,
    full_kv,
    mean_share,
    most_offloaded,
    resident_drafts,
    search,
    used_bytes,
)

HAND = ServerModel(
    machine=Machine(
        name="round numbers",
        memory_bytes=100,
        hbm_bytes_per_s=10,
        link_bytes_per_s=2,
        flops_per_s=1000,
    ),
    weight_bytes=40,
    kv_bytes=8,
    acceptance=Geometric(1.0),
)
CHOICE = IntraChoice(
    resident=1, offloaded=3, draft_length=3, keep=0.5, transfer_fraction=0.5
)


@st.composite
def servers(draw):
    number = st.integers
    machine = Machine(
        name="any",
        memory_bytes=draw(number(50, 300)) + 0.37,
        hbm_bytes_per_s=draw(number(1, 200)),
        link_bytes_per_s=draw(number(1, 200)),
        flops_per_s=draw(number(1, 200)),
    )
    return ServerModel(
        machine=machine,
        weight_bytes=draw(number(1, 60)),
        kv_bytes=draw(number(9, 40)),
        concurrency=draw(st.none() | number(1, 30)),
        acceptance=Geometric(draw(st.floats(0, 1))),
        flops_per_token=draw(number(0, 3)),
        staging_bytes=draw(st.none() | number(0, 20)),
        most_verifies=draw(st.none() | number(1, 2)),
        printed_transfer=draw(st.booleans()),
    )


knobs = st.tuples(st.sampled_from([0.1, 0.25, 0.7]), st.integers(1, 9))


def oracle(server, keep, x, held, offloaded, fraction):
    """Throughput written out from the paper's equations; None where it does not fit."""
    kv, machine = server.kv_bytes, server.machine
    total, accepted = held + offloaded, server.acceptance.accepted(x, keep)
    average = kv * (x * keep + 1) / (x + 1)
    memory = server.weight_bytes + held * kv
    if server.staging_bytes is None:
        memory += offloaded * average
    else:
        memory += offloaded * keep * kv + server.staging_bytes
    verifies = offloaded / (x + 1)
    fits = memory <= machine.memory_bytes
    fits &= server.most_verifies is None or verifies <= server.most_verifies
    fits &= not server.printed_transfer or verifies <= 1
    limit = server.concurrency
    if not (fits or offloaded == 0) or (limit is not None and total > limit):
        return None
    hbm = (server.weight_bytes + total * average) / machine.hbm_bytes_per_s
    passes = total * x / (x + 1) + total / (x + 1) * (x + 1)
    compute = passes * server.flops_per_token / machine.flops_per_s
    link = verifies * fraction * kv / machine.link_bytes_per_s
    if server.printed_transfer and offloaded:
        link /= (x + 1) // offloaded
    return total * (accepted + 1) / (x + 1) / max(hbm, compute, link)


def test_equations_by_hand():
    # KV_avg = 8 * (3 * 1/2 + 1) / 4 = 5.
    assert mean_share(0.5, 3) * 8 == 5
    assert used_bytes(HAND, CHOICE) == 40 + 8 + 3 * 5
    found = estimate(HAND, CHOICE)
    assert found.hbm_s == pytest.approx((40 + 4 * 5) / 10)
    assert found.link_s == pytest.approx(3 * 0.5 * 8 / (4 * 2))
    assert found.cycles_per_load == 1  # 2 s a reload, 6 s an iteration
    assert found.iteration_s == 6
    assert found.tokens_per_s == pytest.approx(4 * (3 + 1) / 4 / 6)


def test_baseline_takes_whole_requests_only():
    plain = full_kv(HAND)
    assert plain.requests == 7  # (100 - 40) / 8 = 7.5
    assert plain.tokens_per_s == pytest.approx(7 / ((40 + 56) / 10))
    assert (plain.accepted, plain.link_s, plain.used_bytes) == (0, 0, 96)


def test_printed_transfer_divides_by_the_cycles_again():
    # 10 requests, x = 29: bytes take 10/30 of a reload's 4 s, the printed l = 3.
    choice = IntraChoice(
        resident=0, offloaded=10, draft_length=29, keep=0.5, transfer_fraction=1.0
    )
    assert estimate(HAND, choice).link_s == pytest.approx(4 / 3)
    printed = estimate(replace(HAND, printed_transfer=True), choice)
    assert printed.link_s == pytest.approx(4 / 9)
    assert printed.cycles_per_load == 3


def test_a_prefetch_that_spans_iterations_counts_them():
    slow = replace(HAND, machine=replace(HAND.machine, link_bytes_per_s=0.5))
    one = replace(CHOICE, offloaded=1)
    # 8 s a reload under iterations of (40 + 2 * 5) / 10 = 5 s.
    assert estimate(slow, one).cycles_per_load == 2


@pytest.mark.parametrize(
    ("changes", "flops", "offloaded", "binds"),
    [
        ({"link_bytes_per_s": 0.1}, 0.0, 3, "link"),
        ({"flops_per_s": 0.01}, 1.0, 3, "compute"),
        ({"memory_bytes": 64}, 0.0, 3, "memory"),
        ({"memory_bytes": 1e6}, 0.0, 3, "hbm"),
        ({"memory_bytes": 1e6, "link_bytes_per_s": 1e6}, 0.0, 100, "hbm"),
    ],
    ids=["link", "compute", "memory", "hbm-of-weights", "hbm-of-kv"],
)
def test_what_binds(changes, flops, offloaded, binds):
    server = replace(
        HAND, machine=replace(HAND.machine, **changes), flops_per_token=flops
    )
    assert estimate(server, replace(CHOICE, offloaded=offloaded)).binds == binds


@given(server=servers(), knob=knobs, fraction=st.sampled_from([None, 1.0, 0.4]))
def test_search_finds_what_trying_everything_finds(server, knob, fraction):
    keep, x = knob
    part = 1 - keep if fraction is None else fraction
    most_held = full_kv(server).requests
    found = search(server, [keep], [x], transfer_fraction=lambda _: part)
    best = max(
        oracle(server, keep, x, held, offloaded, part) or 0.0
        for held in range(most_held + 1)
        for offloaded in range(340)
    )
    assert found.tokens_per_s == pytest.approx(best, rel=1e-9)


@given(server=servers(), knob=knobs)
def test_memory_is_never_exceeded(server, knob):
    found = search(server, [knob[0]], [knob[1]])
    if found.requests:
        assert used_bytes(server, found.choice) <= server.machine.memory_bytes * (
            1 + 1e-12
        )
    limit = server.concurrency
    assert limit is None or found.requests <= limit
    if server.staging_bytes is None and not found.choice.offloaded:
        assert found.requests <= full_kv(server).requests


@given(server=servers(), knob=knobs, factor=st.floats(1, 50))
def test_a_faster_link_never_slows(server, knob, factor):
    rate = server.machine.link_bytes_per_s * factor
    faster = replace(server, machine=replace(server.machine, link_bytes_per_s=rate))
    before = search(server, [knob[0]], [knob[1]]).tokens_per_s
    assert search(faster, [knob[0]], [knob[1]]).tokens_per_s >= before * (1 - 1e-9)


@given(
    kv=st.integers(1, 50),
    room=st.integers(-5, 500),
    skip=st.integers(0, 5),
    concurrency=st.none() | st.integers(1, 20),
)
def test_what_fits_is_what_counting_finds(kv, room, skip, concurrency):
    server = replace(HAND, kv_bytes=kv, concurrency=concurrency)
    count = 0
    limit = 1100 if concurrency is None else concurrency - skip
    while count < limit and (count + 1) * kv * 0.5 <= room:
        count += 1
    assert server.fitting(room, 0.5, skip) == count


def test_resident_drafts_hold_as_many_as_full_kv():
    found = resident_drafts(HAND, 0.5, [1, 3])
    assert found.requests == 7
    assert found.choice.offloaded == 0
    # With p = 1 the longer draft wins: 7 * 4 / 4 over (40 + 7 * 5) / 10.
    assert found.tokens_per_s == pytest.approx(7 / 7.5)


def test_draft_kv_beside_the_full_kv_takes_memory():
    found = resident_drafts(HAND, 0.5, [3], copied=0.5)
    assert found.requests == 5
    assert found.used_bytes == 40 + 5 * (8 + 4)
    assert found.binds == "memory", "a sixth request does not fit"


def test_nothing_fits_beside_too_large_weights():
    server = replace(HAND, weight_bytes=200)
    assert search(server, [0.1], [4]).tokens_per_s == 0
    assert full_kv(server).tokens_per_s == 0
    assert most_offloaded(server, 0.1, 4, 0) == 0


def test_an_inner_drafter_by_hand():
    """With k = 2 at 1/2, m = 7/4: 3 drafts take 12/7 of a cycle's 19/7 forwards."""
    inner = InnerDrafter(length=2, accept=0.5, weight_bytes=10, kv_bytes=1)
    found = estimate(replace(HAND, inner=inner, flops_per_token=1.0), CHOICE)
    share = (12 / 7 * 0.5 + 1) / (19 / 7)
    assert found.hbm_s == pytest.approx((40 + 32 * share + 2 * (10 + 4)) / 10)
    assert found.compute_s == pytest.approx(4 * (3 + 3 * 7 / 19) / 1000)
    assert found.link_s == pytest.approx(24 * 0.5 / (19 / 7) / 2)
    # All 3 drafts are accepted, so the verification's own proposals count: 3/4.
    assert found.tokens_per_s * found.iteration_s == pytest.approx(4 * 4.75 / (19 / 7))


def test_an_inner_drafter_alone_divides_the_reads():
    inner = InnerDrafter(length=3, accept=1.0)
    alone = full_kv(replace(HAND, inner=inner))
    assert alone.tokens_per_s == pytest.approx(4 * full_kv(HAND).tokens_per_s)
