"""Eq. (tp_inter) and path costs by hand, the program against all of its corners."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.errors import ConfigError
from vericache_sglang.planning.hardware import Machine
from vericache_sglang.planning.inter import (
    BASELINE_PATHS,
    LEAST_GAIN,
    PATHS,
    Cluster,
    Pool,
    PoolPair,
    constraints,
    cycle_s,
    fixed_point,
    path_costs,
    simplest,
    solve,
    speculation_s,
)
from vericache_sglang.planning.paper import remote
from vericache_sglang.planning.paper.assumptions import RTX
from vericache_sglang.planning.pools import PAPER_BEST, request_times_s, sweeps

HAND = Cluster(
    machine=Machine(
        name="round numbers",
        memory_bytes=14.5,
        hbm_bytes_per_s=4,
        link_bytes_per_s=1,
        flops_per_s=1,
    ),
    local=1,
    remote=4,
    local_bytes_per_s=1.0,
    remote_bytes_per_s=0.25,
    weight_bytes=8,
    kv_full_bytes=2,
    compressed=0.25,
    output_tokens=10,
    draft_length=4,
    acceptance_rate=0.5,
)


def corners(pools, costs):
    """Best tokens/s over every corner of the constraints; shares no code with scipy."""
    rows, limits = constraints(pools, costs)
    size = len(costs)
    planes = np.vstack([np.array(rows), -np.eye(size)])
    bounds = np.concatenate([limits, np.zeros(size)])
    best = 0.0
    for chosen in combinations(range(len(planes)), size):
        picked = planes[list(chosen)]
        if abs(np.linalg.det(picked)) < 1e-12:
            continue
        point = np.linalg.solve(picked, bounds[list(chosen)])
        if np.all(planes @ point <= bounds + 1e-9 * (1 + abs(bounds))):
            best = max(best, float(point.sum()))
    return best * pools.output_tokens


def test_slots_and_shares_of_gpu_time():
    assert HAND.slots == 3  # (14.5 - 8) / 2
    assert HAND.token_s(2) == pytest.approx((8 / 2 + 2) / 4)


def test_path_costs_by_hand():
    # Local B = 2: a token takes 1.5 s of GPU and 3 s to a request. Remote B = 1: 2.5 s
    # both. Loads: 2 s near; far 8 s, of it 2 s compressed and 6 s rest.
    found = {
        path: tuple(
            (cost.net, pytest.approx(cost.gpu), pytest.approx(cost.mem))
            for cost in costs
        )
        for path, costs in path_costs(HAND.pools, 2, 1).items()
    }
    nothing = (0, 0, 0)
    drafts = (2, 50, 2 + 50)  # 10 / 0.5 = 20 drafts
    # The rest arrives after 6 s: 2.4 drafts, 1.2 tokens; 8.8 tokens are left.
    streaming = (8, 28, 2 + 6 + 22)
    assert found == {
        "B1": ((2, 15, 2 + 30), nothing),
        "B2": (nothing, (8, 25, 8 + 25)),
        "P1-cached": ((2, 7.5, 2 + 50), drafts),  # 5 rounds
        "P1-stateless": ((10, 7.5, 5 * (2 + 3)), drafts),
        "P2-cached": ((2, 1.5, 2 + 6), streaming),  # 1 round
        "P2-stateless": ((2, 1.5, 2 + 3), streaming),
    }


def test_terms_that_the_paper_omits_by_hand():
    pools = replace(
        HAND.pools,
        near=replace(HAND.pools.near, check_s=0.75, prompt_s=3.0),
        far=replace(HAND.pools.far, draft_s=0.25, prompt_s=4.0),
        lead_tokens=2.0,
        drafting_slots=0.5,
    )
    costs = path_costs(pools, 2, 1)
    # 2 tokens of 1.5 s; then 8 / 0.5 = 16 drafts in 4 rounds of 1 + 0.75 s.
    near, far = costs["P1-stateless"]
    assert (near.net, near.gpu) == (5 * 2, 3 + 2 * 1.5 + 4 * 1.75)
    assert near.mem == 5 * 2 + 2 * 3 + 4 * 3
    assert (far.net, far.gpu) == (2, 0.25 * 4 + 16 * 2.25)
    assert far.mem == 0.5 * (2 + 16 * 2.25)
    assert costs["P1-cached"][0].mem == 2 + 2 * 3 + 16 * 2.25
    # The rest after 6 s: 8 / 3 drafts, 4 / 3 tokens; 20 / 3 are left.
    near, far = costs["P2-cached"]
    assert near.gpu == pytest.approx(3 + 2 * 1.5 + 1.75)
    assert far.gpu == pytest.approx(4 + 8 / 3 * 2.25 + 20 / 3 * 2.5)
    assert costs["B1"][0].gpu == 3 + 15
    assert costs["B2"][1].gpu == 4 + 25


@pytest.mark.parametrize(
    ("load_s", "seconds"),
    # Four drafts take 10 s, a verification 3 s: five cycles of 13 s after 2 s; or of
    # 15 s, where the verifier takes 12 s to load.
    [(0.0, 67.0), (2.0, 67.0), (12.0, 77.0)],
)
def test_a_requests_time_by_hand(load_s, seconds):
    cycle = cycle_s(draft_length=4, token_s=2.5, load_s=load_s, forward_s=3.0)
    assert speculation_s(2.0, 10, 4, 0.5, cycle) == pytest.approx(seconds)


def test_request_times_at_full_batches_by_hand():
    # Batches of 3: an iteration reads 14 bytes in 3.5 s. KV near in 2 s, far in 8 s.
    assert request_times_s(HAND) == pytest.approx(
        {"B1": 2 + 35, "B2": 8 + 35, "P1": 2 + 5 * (4 * 3.5 + 3.5)}
    )


def test_sweeps_of_figure_13_have_the_designs_values():
    """Ours, computed before this code by the design of remote prefix caching."""
    cluster = remote.cluster("mistral-small-24b", RTX, 1, 256)
    instances, arrival = sweeps(cluster)
    known = {
        instances: (1.27, 1.41, 1.49, 1.41, 1.36, 1.32, 1.28, 1.25),
        arrival: (1.00, 1.01, 1.19, 1.46, 1.57, 1.71, 1.70, 1.51, 1.33),
    }
    for sweep, speedups in known.items():
        found = [ratio for _, ratio in sweep.points]
        assert found == pytest.approx(speedups, abs=0.011)
    assert arrival.best == PAPER_BEST[arrival.label]
    assert abs(instances.best - PAPER_BEST[instances.label]) <= 1


def test_shares_are_of_requests():
    mix = solve(HAND.pools)
    assert sum(mix.shares.values()) == pytest.approx(1)
    total = mix.tokens_per_s / HAND.output_tokens
    for path, share in mix.shares.items():
        assert share * total == pytest.approx(mix.requests_per_s[path])


clusters = st.builds(
    lambda near, far, output, rate, remote: replace(
        HAND,
        local_bytes_per_s=near,
        remote_bytes_per_s=far,
        output_tokens=output,
        acceptance_rate=rate,
        remote=remote,
    ),
    near=st.floats(0.5, 8),
    far=st.floats(0.02, 2),
    output=st.integers(1, 60),
    rate=st.floats(0.2, 1),
    remote=st.integers(0, 6),
)


@settings(max_examples=12)
@given(cluster=clusters)
def test_program_reaches_the_best_corner(cluster):
    mix = fixed_point(cluster.pools, PATHS)
    assert 1 <= mix.local_batch <= cluster.slots
    assert 1 <= mix.remote_batch <= cluster.slots
    if mix.converged:
        table = path_costs(cluster.pools, mix.local_batch, mix.remote_batch)
        best = corners(cluster.pools, [table[path] for path in PATHS])
        # The batches are known to a part in a thousand.
        assert mix.tokens_per_s == pytest.approx(best, rel=5e-3)


seconds = st.floats(0.01, 2)
measured_pools = st.builds(
    lambda near, far, *own: PoolPair(
        **{"near": near, "far": far, "output_tokens": 20, "draft_length": 7.5},
        **dict(
            zip(
                ("compressed", "acceptance_rate", "lead_tokens", "drafting_slots"),
                own,
                strict=True,
            )
        ),
    ),
    *[
        st.builds(
            Pool,
            instances=st.floats(0.2, 4),
            slots=st.floats(1, 20),
            **dict.fromkeys(
                ("load_s", "base_s", "row_s", "check_s", "draft_s", "prompt_s"), seconds
            ),
        )
    ]
    * 2,
    *(st.floats(0.05, 1), st.floats(0.1, 1), st.floats(0, 19), st.floats(0.1, 1)),
)


@settings(max_examples=12)
@given(pools=measured_pools)
def test_at_given_batches_the_mix_is_almost_that_of_the_best_corner(pools):
    batches = (1.0, 1.0)
    costs = [path_costs(pools, *batches)[path] for path in PATHS]
    best = corners(pools, costs)
    found = simplest(pools, batches=batches).tokens_per_s
    assert best / (1 + LEAST_GAIN) * (1 - 1e-6) <= found <= best * (1 + 1e-6)


@settings(max_examples=12)
@given(cluster=clusters)
def test_more_paths_never_lose(cluster):
    plain, free = solve(cluster.pools, BASELINE_PATHS), solve(cluster.pools)
    assert free.converged or not plain.converged
    if plain.converged:
        assert free.tokens_per_s >= plain.tokens_per_s


@settings(max_examples=12)
@given(cluster=clusters)
def test_the_mix_to_follow_gives_up_little_for_fewer_paths(cluster):
    best, plain = solve(cluster.pools), solve(cluster.pools, BASELINE_PATHS)
    followed = simplest(cluster.pools)
    enough = best.tokens_per_s / (1 + LEAST_GAIN)
    assert followed.converged == best.converged
    assert followed.tokens_per_s >= enough
    if plain.converged == best.converged and plain.tokens_per_s >= enough:
        assert followed == plain


def test_pure_local_serving_by_hand():
    # A link that never binds: the GPU runs batches of 3, 3 tokens per 14 bytes read.
    alone = replace(HAND, remote=0, local_bytes_per_s=1e6)
    mix = solve(alone.pools, ["B1"])
    assert mix.converged
    assert mix.local_batch == pytest.approx(3, rel=1e-2)
    assert mix.tokens_per_s == pytest.approx(3 / (14 / 4), rel=1e-2)


def test_a_slow_network_leaves_small_batches():
    slow = replace(HAND, remote=0, local_bytes_per_s=0.05)
    mix = solve(slow.pools, ["B1"])
    # 40 s a load, 0.25 tokens/s: (8 / B + 2) / 4 = 4 gives B = 8 / 14, at least 1.
    assert mix.tokens_per_s == pytest.approx(0.25)
    assert mix.local_batch == 1


def test_impossible_clusters_are_refused():
    for change in (
        {"kv_full_bytes": 7},
        {"local": 0},
        {"acceptance_rate": 0.0},
        {"compressed": 1.5},
    ):
        with pytest.raises(ConfigError):
            replace(HAND, **change)
