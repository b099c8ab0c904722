"""Ranks that know different things reach the same plans; real gloo, forked ranks."""

from collections import Counter
from random import Random
from types import SimpleNamespace

import pytest
import torch
from forked_ranks import Ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_sglang.compression.budget import Budget
from vericache_sglang.errors import InvariantError, LostKVError, TransferError
from vericache_sglang.kv.geometry import KVGeometry
from vericache_sglang.kv.host_pages import HostPagePool
from vericache_sglang.kv.host_store import HostStore
from vericache_sglang.kv.prefetch import Progress
from vericache_sglang.runtime.tp_host import TensorParallelHost
from vericache_sglang.runtime.tp_sync import WIDTH, TensorParallelSync
from vericache_sglang.sampling.profile import Profile, SamplingRule
from vericache_sglang.scheduling.estimates import Estimates
from vericache_sglang.scheduling.iteration_model import Coefficients, IterationModel
from vericache_sglang.scheduling.plan import (
    Compress,
    Load,
    Offload,
    Plan,
    RequestSpec,
    Residency,
    RowResult,
    SchedulerInput,
    SwapOut,
    Verify,
)
from vericache_sglang.scheduling.runtime import Runtime
from vericache_sglang.scheduling.settings import RuntimeSettings

FAILED, TRAVELLING, ARRIVED = Progress
SIZE = Budget(10, 3, 0, 0)
"""7 slots of complement, 3 exact tokens."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Three ranks: with two, a mean or a least of the first two would pass."""
    three = Ranks(3, tmp_path_factory.mktemp("ranks"))
    yield three
    three.close()


def agreed(group, measured=None, **more):
    return TensorParallelSync(measured or Estimates(), group, **more)


# -- what is agreed on ----------------------------------------------------------


def sync_inputs(group, rank, host_slots, prefetches):
    tp_sync = agreed(group)
    reported = tp_sync.sync_inputs(host_slots[rank], prefetches[rank])
    return reported.host_slots, reported.prefetches


@given(
    st.integers(0, 6).flatmap(
        lambda count: st.lists(
            st.lists(st.sampled_from(Progress), min_size=count, max_size=count),
            min_size=3,
            max_size=3,
        )
    ),
    st.lists(st.integers(0, 10**12), min_size=3, max_size=3),
)
def test_a_copy_counts_as_its_slowest_rank_sees_it(ranks, prefetches, host_slots):
    """Arrived on all, failed on any; room is what the fullest rank has."""
    ranks_of = zip(*prefetches, strict=True)
    wanted = [next(one for one in Progress if one in each) for each in ranks_of]
    answers = ranks.call(sync_inputs, host_slots, prefetches)
    assert answers == [(min(host_slots), tuple(wanted))] * 3


def measure(group, rank):
    """Measure something else on every rank; return what is planned by, and by whom."""
    start = Coefficients(*(value * (rank + 1) for value in (1e-3, 1e-5, 1e-7, 1e-9)))
    measured = Estimates(iteration=IterationModel(start))
    measured.link.observe(10**7, 1e-3 * (rank + 1), "in")
    measured.link.observe(10**3, 1e-5 * (rank + 1), "out")
    for _ in range(2):
        measured.split_s.observe(1e-5 * (rank + 1))
    measured.drafter_s.observe(1e-3 * (rank + 1))
    measured.iteration.iteration_s.observe(0.02 * (rank + 1))
    tp_sync = agreed(group, measured)
    before = tp_sync.estimates.report()
    tp_sync.sync_inputs(1, [])
    return before, tp_sync.estimates.report(), measured.report()


def test_every_rank_plans_by_what_rank_0_measured(ranks):
    answers = ranks.call(measure)
    first = answers[0][2]
    assert [told for _, told, _ in answers] == [first] * 3
    assert first["iteration_base_s"] == 1e-3
    assert first["iteration_s"] == 0.02
    assert first["link_in_large_bytes_per_s"] == pytest.approx(1e10)
    assert first["link_out_small_bytes_per_s"] == pytest.approx(1e8)
    assert first["compress_s_per_token"] == 1e-5
    assert first["inner_drafter_s"] == 1e-3
    for before, told, measured in answers[1:]:
        assert before != told
        assert measured != told, "their own measurements went on"


def test_a_rank_that_is_alone_plans_by_what_it_measures():
    measured = Estimates()
    alone = TensorParallelSync(measured, strict=True)
    assert alone.estimates is measured
    assert alone.leads
    reported = alone.sync_inputs(7, [ARRIVED, TRAVELLING])
    assert (reported.host_slots, reported.prefetches) == (7, (ARRIVED, TRAVELLING))
    assert (alone.first(3.5), alone.mean_of_all(2.5), alone.most(4)) == (3.5, 2.5, 4)
    assert alone.mean_of_all(None) is None
    assert alone.every(True)
    assert not alone.every(False)


def combine(group, rank):
    tp_sync = agreed(group)
    values = (0.25, 0.5, 0.125)
    assert tp_sync.leads is (rank == 0)
    return (
        tp_sync.first(values[rank]),
        tp_sync.mean_of_all(values[rank]),
        tp_sync.mean_of_all(None if rank == 1 else values[rank]),
        tp_sync.most((4, 9, 2)[rank]),
        tp_sync.every(rank != 1),
        tp_sync.every(True),
    )


def test_single_values_are_combined(ranks):
    assert ranks.call(combine) == [(0.25, 0.875 / 3, None, 9, False, True)] * 3


def test_ranks_with_other_prefetches_are_found_out(ranks):
    answers = ranks.call(sync_inputs, (1, 1, 1), ([ARRIVED], [ARRIVED], []))
    assert all(isinstance(answer, InvariantError) for answer in answers)


def sync_many(group, rank, count):
    """More prefetches than fit one message; each is least on another rank."""
    own = [100 + (i + rank) % 3 for i in range(count)]
    return agreed(group).sync_inputs(1, own).prefetches


@pytest.mark.parametrize("count", [0, WIDTH - 12, WIDTH - 11, 3 * WIDTH])
def test_any_number_of_prefetches_is_synchronised(ranks, count):
    assert ranks.call(sync_many, count) == [(100,) * count] * 3


def compare_plans(group, rank, lengths, strict):
    world = SchedulerInput(free_slots=1, host_slots=1, rows=1)
    rows = {"a": Verify("a")} if lengths[rank] else {}
    plan = Plan(iteration=17, stage_ins=(), rows=rows, moves=())
    agreed(group, strict=strict).check(world, plan)


def test_plans_are_compared_under_the_strict_checks_only(ranks):
    assert ranks.call(compare_plans, (1, 1, 1), True) == [None] * 3
    assert ranks.call(compare_plans, (1, 0, 1), False) == [None] * 3
    for error in ranks.call(compare_plans, (1, 0, 1), True):
        assert isinstance(error, InvariantError)
        assert "plan differently in iteration 17" in str(error)


def draw(group, rank):
    """Return the keys of a request that drew one, again, and of ones that did not."""
    tp_sync = agreed(group)
    keys = []
    for rule, seed in (
        (SamplingRule.COUPLED, None),
        (SamplingRule.COUPLED, None),
        (SamplingRule.REJECTION, None),
        (SamplingRule.COUPLED, 5),
        (SamplingRule.SEEDED, None),
        (SamplingRule.GREEDY, None),
    ):
        state = SimpleNamespace(
            rid="a",
            req=SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)),
            profile=Profile(rule, seed=1000 + rank),
        )
        tp_sync.same_noise(state)
        assert state.profile.rule is rule
        keys.append(state.profile.seed)
    return keys


def test_unseeded_noise_is_the_same_on_every_rank_and_new_each_time(ranks):
    answers = ranks.call(draw)
    drawn = answers[0][:3]
    assert [answer[:3] for answer in answers] == [drawn] * 3
    assert len(set(drawn)) == 3
    assert [answer[3:] for answer in answers] == [[1000 + r] * 3 for r in range(3)]
    assert ranks.call(draw)[0][:3] != drawn, "another server draws other noise"


# -- host memory ----------------------------------------------------------------


def store(budget=10**6):
    geometry = KVGeometry(
        layers=2, kv_heads=1, head_dim=4, v_head_dim=4, element_bytes=4, page_size=1
    )
    return HostStore(geometry, torch.float32, HostPagePool(budget, 64, pinned=False))


def filled(host, rid, content):
    residual = host.open(rid, SIZE)
    residual.keys.fill_(content)
    residual.values.fill_(content)
    residual.kept.zero_()
    for layer in range(residual.layers):
        residual.seal(layer)
    return residual


def share_all(group, rank, contents):
    """Save one complement after the other; return what each refers to."""
    host = store()
    common = TensorParallelHost(agreed(group), host, lambda state: SIZE)
    names = {}
    for rid, content in enumerate(contents):
        if content is None:
            common.forget("0")
            host.drop("0")
            names.pop("0")
            continue
        filled(host, str(rid), content[rank])
        common.share(str(rid))
        names[str(rid)] = host.group_of(str(rid))
    return names


def test_residuals_are_shared_where_every_rank_has_them_equal(ranks):
    one, two, mixed = (1, 1, 1), (2, 2, 2), (1, 1, 3)
    answers = ranks.call(share_all, [one, two, one, mixed, mixed, two])
    assert answers == [answers[0]] * 3
    groups = answers[0]
    assert groups["2"] == groups["0"]
    assert groups["5"] == groups["1"]
    assert groups["3"] not in (groups["0"], groups["1"]), "equal on two ranks only"
    # Equal to two groups on ranks 0 and 1, to the later one on rank 2: not taken.
    assert groups["4"] not in (groups["0"], groups["3"])


def test_a_residual_that_left_is_shared_with_nobody(ranks):
    one = (1, 1, 1)
    answers = ranks.call(share_all, [one, None, one, one])
    assert answers == [answers[0]] * 3
    assert answers[0]["2"] == answers[0]["3"]


def share_damaged(group, rank, damaged_on):
    """Save two equal complements; a bit of the first flips before the second comes."""
    host = store()
    common = TensorParallelHost(agreed(group), host, lambda state: SIZE)
    first = filled(host, "0", 1.0)
    common.share("0")
    if rank == damaged_on:
        first.keys[0, 0, 0, 0] = 2.0
    filled(host, "1", 1.0)
    common.share("1")
    return host.group_of("0") == host.group_of("1")


def test_bytes_are_compared_on_every_rank_before_they_are_shared(ranks):
    assert ranks.call(share_damaged, None) == [True] * 3
    assert ranks.call(share_damaged, 1) == [False] * 3


ALIKE = (0, 0, 0), (0, 0, 1), (0, 1, 0)
"""Contents by rank: equal on some ranks, on others not."""


@given(st.lists(st.sampled_from(ALIKE), min_size=2, max_size=8))
def test_whatever_is_equal_where_the_ranks_share_the_same(ranks, contents):
    answers = ranks.call(share_all, contents)
    assert answers == [answers[0]] * 3
    for a, one in enumerate(contents):
        for b, other in enumerate(contents):
            if answers[0][str(a)] == answers[0][str(b)]:
                assert one == other


def ask(group, rank, kind, fault_on):
    """Ask for a move that rank ``fault_on`` cannot make."""
    full = store(budget=64) if kind == "room" and rank == fault_on else store()
    common = TensorParallelHost(agreed(group), full, lambda state: SIZE)
    state = SimpleNamespace(
        rid="a",
        parts=None,
        row_length=10,
        pending_max=0,
        drafted=0,
        residency=Residency.HOST,
        split=SimpleNamespace(shared_count=0),
    )
    if kind == "room":
        moves = Compress("a", Residency.HOST), Offload("a"), SwapOut("a")
        return [common.permits(move, state) for move in moves]
    residual = filled(full, "a", 1.0)
    if rank == fault_on:
        residual.keys[1, 3, 0, 2] = 2.0
    joins = common.joins(state)
    try:
        return joins, common.permits(Load("a"), state)
    except TransferError as error:
        return joins, str(error)


@pytest.mark.parametrize("fault_on", [None, 0, 2])
def test_a_move_is_made_by_all_ranks_or_by_none(ranks, fault_on):
    fine = fault_on is None
    assert ranks.call(ask, "room", fault_on) == [[fine] * 3] * 3
    damaged = (False, "a rank's host copy is damaged")
    wanted = (True, True) if fine else damaged
    assert ranks.call(ask, "damage", fault_on) == [wanted] * 3


def settle(group, rank, outcomes):
    return TensorParallelHost(agreed(group), store(), None).settles(*outcomes[rank])


MADE, REFUSED, LOST = (True, False), (False, False), (False, True)


@pytest.mark.parametrize(
    ("outcomes", "answer"),
    [
        ([MADE] * 3, True),
        ([REFUSED] * 3, False),
        ([LOST] * 3, LostKVError),
        ([MADE, MADE, REFUSED], LostKVError),
        ([REFUSED, LOST, REFUSED], LostKVError),
    ],
)
def test_what_some_ranks_alone_could_copy_is_lost_on_all(ranks, outcomes, answer):
    answers = ranks.call(settle, outcomes)
    if answer is LostKVError:
        assert all(isinstance(each, LostKVError) for each in answers)
    else:
        assert answers == [answer] * 3


# -- the runtime on top -----------------------------------------------------------


def serve(group, rank, seed, listens):
    """Run the scheduler over a machine that is another one on every rank."""
    shared, own = Random(seed), Random(1000 * seed + rank)
    tp_sync = agreed(group) if listens else TensorParallelSync(Estimates())
    measured = tp_sync.measured
    tp_sync.sync_inputs(10**6, [])
    config = RuntimeSettings(
        residency="host",
        draft_length=6,
        max_verifies=2,
        staging_slots=700,
        token_bytes=2048,
    )
    runtime = Runtime(config, tp_sync.estimates)
    plans, coming = [], {}
    for iteration in range(60):
        if iteration % 6 == 0 and len(runtime.tracks) < 6:
            runtime.arrive(
                RequestSpec(
                    rid=str(iteration), prompt=400, kept=100, dropped=300, remaining=99
                )
            )
        seen = []
        for wait in coming.values():
            if own.random() < 0.03:
                seen.append(FAILED)
            else:
                seen.append(ARRIVED if wait <= 0 else TRAVELLING)
        measured.iteration.iteration_s.observe(own.uniform(0.5e-3, 20e-3))
        measured.link.observe(10**6, own.uniform(1e-4, 1e-2), "in")
        reported = tp_sync.sync_inputs(own.randrange(10**5, 10**6), seen)
        progress = dict(zip(coming, reported.prefetches, strict=True))
        at = {
            state: [r for r, p in progress.items() if p == state] for state in Progress
        }
        coming = {rid: coming[rid] - 1 for rid in at[TRAVELLING]}
        world = SchedulerInput(
            free_slots=10**5,
            host_slots=reported.host_slots,
            rows=max(1, len(runtime.tracks)),
            arrived=tuple(at[ARRIVED]),
            failed=tuple(at[FAILED]),
        )
        drafted = Counter({rid: t.drafts for rid, t in runtime.tracks.items()})
        plan = runtime.plan(world)
        for stage_in in plan.stage_ins:
            coming[stage_in.rid] = own.randrange(4)
        runtime.report(
            RowResult(rid, drafted[rid], shared.randint(1, drafted[rid] + 1))
            for rid, action in plan.rows.items()
            if isinstance(action, Verify)
        )
        for move in plan.moves:
            runtime.moved(move)
        for rid in [r for r, track in runtime.tracks.items() if track.remaining <= 0]:
            runtime.leave(rid)
            coming.pop(rid, None)
        plans.append(f"{world} {plan}")
    return plans


@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_plans_are_the_same_however_the_ranks_differ(ranks, seed):
    answers = ranks.call(serve, seed, True)
    assert answers[0] == answers[1] == answers[2]
    assert sum("Prefetch" in plan for plan in answers[0]) >= 5
    assert sum("Verify" in plan for plan in answers[0]) >= 5


def test_without_the_exchange_the_plans_part(ranks):
    """Or the test above would prove nothing."""
    answers = ranks.call(serve, 1, False)
    assert answers[0] != answers[1]
