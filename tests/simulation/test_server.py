"""The simulated server against hand-computed times and the paper's example."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import ConfigError
from vericache_sglang.scheduling.iteration_model import Work
from vericache_sglang.scheduling.plan import SwapIn, SwapOut
from vericache_sglang.simulation.costs import Costs
from vericache_sglang.simulation.policies import policies
from vericache_sglang.simulation.server import SimulatedServer
from vericache_sglang.simulation.setup import Setup, kept_slots, settings_for
from vericache_sglang.simulation.timeline import Timeline
from vericache_sglang.simulation.workload import (
    RequestMix,
    Workload,
    closed_loop,
    poisson,
)

POLICIES = policies(0.25)
DRAFTING = [name for name, policy in POLICIES.items() if policy.drafts]


def costs(slots=2000, **changes):
    fields = {
        "memory_bytes": 1e9 + slots * 1000.0,
        "weight_bytes": 1e9,
        "token_bytes": 1000,
        "hbm_bytes_per_s": 1e11,
        "flops_per_s": 1e15,
        "flops_per_token": 1e9,
        "flops_per_product": 1e4,
        "overhead_s": 1e-3,
        "link_bytes_per_s": 1e9,
        "link_latency_s": 0.0,
    }
    return Costs(**{**fields, **changes})


def mix(**changes):
    fields = {"contexts": (100,), "output": 21, "accept": 1.0}
    return RequestMix(**{**fields, **changes})


def burst(load, requests):
    """So many requests at time 0 and none after."""
    asked = closed_loop(load, requests).sample()
    return Workload(lambda: iter(asked), requests)


def simulated(policy, workload, machine=None, **changes):
    setup = Setup(costs=machine or costs(), workload=workload, **changes)
    return SimulatedServer(setup, POLICIES[policy])


def drain(server):
    while (event := server.machine.next_event()) is not None:
        server.machine.advance(event)


def forward_s(machine, tokens, slots):
    return machine.forward_s(Work(tokens, slots, tokens * slots))


# -- hand-computed ---------------------------------------------------------------


def test_one_request_decoded_plainly_takes_one_growing_read_a_token():
    machine = costs()
    result = simulated("full-kv", burst(mix(), 1), machine).run()
    by_hand = sum(forward_s(machine, 1, 100 + i) for i in range(1, 22))
    assert result.seconds == pytest.approx(by_hand, rel=1e-12)
    assert result.tokens_per_s == pytest.approx(21 / by_hand)
    assert result.iterations == 21


@pytest.mark.parametrize("link_bytes_per_s", [1e12, 1e6])
@pytest.mark.parametrize("pacing", ["staggered", "lock-step", "sequential"])
def test_one_request_drafted_for_one_token_at_a_time(pacing, link_bytes_per_s):
    machine = costs(link_bytes_per_s=link_bytes_per_s)
    server = simulated(pacing, burst(mix(), 1), machine, draft_length=1)
    result = server.run()
    # The first token is decoded plainly; each of ten rounds drafts one and emits two.
    prefetch_s = 75 * 1000 / link_bytes_per_s
    seconds = forward_s(machine, 1, 101)
    for tokens in range(101, 121, 2):
        draft_s = forward_s(machine, 1, tokens - 75 + 1)
        if pacing == "staggered":  # the reload runs beside the draft
            seconds += max(draft_s, prefetch_s)
        else:
            seconds += draft_s + prefetch_s
        seconds += forward_s(machine, 2, tokens + 2)
    assert result.seconds == pytest.approx(seconds, rel=1e-9)
    assert (result.accepted, result.drafted) == (1.0, 1.0)
    assert server.emitted == {"r0": 21}


def test_a_full_kv_server_is_as_fast_as_its_closed_form():
    machine = costs(slots=10_000)
    load = closed_loop(mix(contexts=(900,), output=300), 60, warm=12)
    result = simulated("full-kv", load, machine).run()
    batch = 10_000 // 1200
    mean_s = sum(forward_s(machine, batch, batch * (900 + i)) for i in range(1, 301))
    assert result.batch == pytest.approx(batch, rel=0.02)
    assert result.tokens_per_s == pytest.approx(batch * 300 / mean_s, rel=0.02)
    assert result.hbm_share == pytest.approx(1 - 1e-3 * 300 / mean_s, rel=0.02)


def test_prefill_is_charged_when_prompts_are_not_precomputed():
    machine = costs()
    plain = simulated("full-kv", burst(mix(), 1), machine).run()
    whole = simulated("full-kv", burst(mix(), 1), machine, precomputed=False).run()
    prefill_s = machine.forward_s(Work(100, 100, 100 * 100 // 2))
    assert whole.seconds - plain.seconds == pytest.approx(prefill_s)


@pytest.mark.parametrize(
    ("prompt", "keep", "kept"), [(100, 0.25, 25), (101, 0.25, 26), (1, 0.01, 1)]
)
def test_kept_slots(prompt, keep, kept):
    assert kept_slots(prompt, keep) == kept


@pytest.mark.parametrize(
    ("name", "fraction"),
    [("staggered", 1.0), ("staggered-copy", 4 / 3), ("split-planes", 0.39 / 0.69)],
)
def test_what_a_prefetch_moves_of_a_residual(name, fraction):
    setup = Setup(costs=costs(), workload=burst(mix(), 1))
    assert settings_for(setup, POLICIES[name]).transfer_fraction == pytest.approx(
        fraction
    )


# -- the paper's worked example (section 4.1) ---------------------------------------


def worked_example(policy, workload=None, **inner):
    """Mistral 24B on an RTX PRO 6000: 10 requests of 4 GB, 1 GB of it kept, x = 30."""
    machine = Costs(
        memory_bytes=96e9,
        weight_bytes=50e9,
        token_bytes=163_840,
        hbm_bytes_per_s=1.72e12,
        flops_per_s=500e12,
        flops_per_token=47e9,
        flops_per_product=655_360.0,
        overhead_s=0.0,
        link_bytes_per_s=50e9,
    )
    workload = workload or closed_loop(long_answers(0.98), 30, warm=8, concurrency=10)
    # The paper's reload moves the whole KV.
    moving_all = replace(POLICIES[policy], prefetch=1.0)
    setup = Setup(costs=machine, workload=workload, draft_length=30, **inner)
    return SimulatedServer(setup, moving_all)


def long_answers(accept):
    return mix(contexts=(round(4e9 / 163_840),), output=400, accept=accept)


def test_requests_whose_drafts_are_rejected_end_no_other_ones_drafting():
    wrong = closed_loop(long_answers(0.0), 120).sample()
    right = closed_loop(long_answers(0.98), 60).sample()
    right = [replace(each, rid=f"later {each.rid}") for each in right]
    drafted, accepted = [], []
    for asked in (wrong, wrong + right):
        workload = Workload(lambda asked=asked: iter(asked), len(asked))
        server = worked_example("hybrid", workload)
        server.run()
        drafted.append(server.counters.drafted)
        accepted.append(server.counters.accepted)
    assert 0 < drafted[0] < 0.1 * 120 * 400
    assert accepted[0] == 0
    assert accepted[1] > 0.3 * 60 * 400


def test_staggering_beats_lock_step_and_sequential_on_the_papers_example():
    results = {
        name: worked_example(name).run()
        for name in ("full-kv", "lock-step", "sequential", "staggered")
    }
    assert results["full-kv"].batch == pytest.approx(10, abs=0.5)
    rate = {name: row.tokens_per_s for name, row in results.items()}
    assert rate["staggered"] > 1.4 * rate["lock-step"]
    assert rate["staggered"] > 1.4 * rate["sequential"]
    assert rate["staggered"] > rate["full-kv"]
    # 10 complements of 3 GB at once, against one under verification and one arriving.
    assert results["lock-step"].peak_staged_bytes == pytest.approx(30e9, rel=0.01)
    assert results["staggered"].peak_staged_bytes <= 2 * 3.01e9
    assert results["sequential"].peak_staged_bytes <= 1 * 3.01e9
    # 800 ms of transfers that nothing overlaps, against about 30 x 35 ms of drafts.
    assert results["lock-step"].wait_share < results["sequential"].wait_share
    assert results["staggered"].link_in_share > results["lock-step"].link_in_share


@pytest.mark.parametrize("accept", [0.0, 0.3, 0.6, 0.9])
def test_an_inner_drafter_with_vericache_is_as_fast_as_the_better_of_the_two(accept):
    """On this machine a further token of a row costs next to nothing."""
    inner = {"proposals": 4, "proposal_accept": accept}
    plain, ours, alone, both = (
        worked_example(name, **more).run().tokens_per_s
        for more in ({}, inner)
        for name in ("full-kv", "hybrid")
    )
    assert alone / plain == pytest.approx(sum(accept**i for i in range(5)), rel=0.05)
    assert both >= 0.97 * max(alone, ours)


@pytest.mark.parametrize("policy", ["full-kv", "hybrid"])
def test_useless_proposals_end_where_they_cost_nothing_too(policy, monkeypatch):
    server = worked_example(policy, proposals=4, proposal_accept=0.0)
    report, proposed = server.runtime.report, []

    def counted(results):
        results = [*results]
        proposed.extend(result.proposed for result in results)
        report(results)

    monkeypatch.setattr(server.runtime, "report", counted)
    server.run()
    assert 0 < sum(proposed) < 0.3 * sum(server.emitted.values())


# -- rules that hold for every run ----------------------------------------------------


def check_conserved(server, requests, output):
    drain(server)
    assert {*server._held_at_end().values()} == {0}
    assert server.counters.finished == requests
    assert set(server.emitted.values()) == {output}
    assert len(server.emitted) == requests
    for room in (server.machine.pool, server.machine.staging, server.machine.host):
        assert room.used == 0
        assert room.peak <= room.total
    reserved = ("ring_link_reserved", "ring_staging_reserved", "unplaced_cycles")
    told = server.runtime.figures()
    assert told["staging_held_slots"] == 0
    assert all(told.get(name, 0) == 0 for name in reserved)


@given(
    policy=st.sampled_from(list(POLICIES)),
    load=st.builds(
        RequestMix,
        contexts=st.lists(st.integers(20, 300), min_size=1, max_size=3).map(tuple),
        output=st.integers(1, 60),
        accept=st.floats(0, 1),
        share=st.integers(1, 4),
        seed=st.integers(0, 10_000),
    ),
    slots=st.integers(1000, 4000),
    link_bytes_per_s=st.sampled_from([1e6, 1e7, 1e9]),
    reserve=st.sampled_from([0.0, 1.0]),
    precomputed=st.booleans(),
    proposals=st.integers(0, 4),
    proposal_accept=st.floats(0, 1),
)
def test_every_slot_and_every_token_is_accounted_for(
    policy, load, slots, link_bytes_per_s, **others
):
    machine = costs(slots, link_bytes_per_s=link_bytes_per_s)
    server = simulated(policy, burst(load, 14), machine, draft_length=8, **others)
    server.run()
    check_conserved(server, 14, load.output)


@pytest.mark.parametrize("policy", DRAFTING)
def test_four_times_the_memory_asked_for_and_nobody_starves(policy):
    output = 90
    load = mix(contexts=(60, 90), output=output, accept=0.95, spread=0.04)
    server = simulated(
        policy, burst(load, 200), costs(slots=7500), draft_length=8, reserve=0.0
    )
    asked = 200 * (75 + output)
    assert asked > 4 * server.machine.pool.total
    result = server.run()
    check_conserved(server, 200, output)
    assert result.swapped > 0 or policy == "sparse-resident"
    assert max(server.offloader.swapped_waits_s, default=0.0) < result.seconds / 4


@settings(max_examples=5)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(["staggered", "hybrid", "lock-step", "sequential"]),
)
def test_swapped_requests_return_in_the_order_they_left(seed, policy):
    # Short prompts, long answers: what is let in outgrows the device.
    load = mix(contexts=(60, 90), output=150, accept=0.9, seed=seed)
    server = simulated(
        policy,
        burst(load, 40),
        costs(slots=2500),
        draft_length=4,
        reserve=0.0,
        seed=seed,
    )
    perform, away, returned = server.offloader.perform, [], []

    def watched(state, move):
        done = perform(state, move)
        if done and isinstance(move, SwapOut):
            away.append(state.rid)
        elif done and isinstance(move, SwapIn):
            assert away.pop(0) == state.rid
            returned.append(state.rid)
        return done

    server.offloader.perform = watched
    result = server.run()
    assert not away
    assert len(returned) == result.swapped > 0
    check_conserved(server, 40, 150)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_equal_seeds_give_equal_figures(policy):
    load = poisson(mix(accept=0.8, contexts=(50, 200), seed=3), 20, 200.0)
    first, second, other = (
        simulated(policy, load, draft_length=8, seed=seed).run() for seed in (1, 1, 2)
    )
    assert first == second
    assert first.finished == other.finished == 20
    # Luck decides about drafts alone, and is never short of it at 0.99.
    lucky = POLICIES[policy].accept is not None or not POLICIES[policy].drafts
    assert (first == other) or POLICIES[policy].drafts
    assert (first != other) or lucky


def test_sharers_of_a_prompt_share_prefetches():
    load = burst(mix(share=4, contexts=(200,), output=200, accept=0.97), 16)
    machine = costs(slots=6000, link_bytes_per_s=4e6)
    alone = simulated("staggered", load, machine, draft_length=8)
    shared = simulated("coalesced", load, machine, draft_length=8)
    # The link is what everyone waits for, and four requests wait for one reload.
    assert shared.run().tokens_per_s > 2 * alone.run().tokens_per_s
    copies = [len(each.machine.to_device.copies) for each in (shared, alone)]
    assert copies[0] < copies[1] / 3
    assert shared.machine.host.peak == alone.machine.host.peak // 4


def test_a_request_that_cannot_fit_is_refused_by_name():
    with pytest.raises(ConfigError, match="lower --context"):
        simulated("full-kv", burst(mix(contexts=(5000,)), 1)).run()


def test_the_timeline_has_every_forward_and_copy():
    setup = Setup(costs=costs(), workload=burst(mix(), 3), draft_length=4)
    timeline = Timeline()
    server = SimulatedServer(setup, POLICIES["staggered"], timeline)
    result = server.run()
    ends = [end for _, end, _ in timeline.forwards]
    assert ends == sorted(ends)
    assert ends[-1] == pytest.approx(result.seconds)
    assert sum("verify" in rows for _, _, rows in timeline.forwards) > 0
    assert len(timeline.to_device) == len(server.machine.to_device.copies) > 0
