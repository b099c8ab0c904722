"""Requests with draft KV alone: they draft, wait, and become ordinary ones."""

import pytest

from vericache_sglang.scheduling.plan import (
    Complete,
    Draft,
    Plain,
    RequestSpec,
    Residency,
    RowResult,
    SchedulerInput,
    Verify,
    Wait,
)
from vericache_sglang.scheduling.runtime import Runtime
from vericache_sglang.scheduling.settings import RuntimeSettings

DRAFTS = 5


def started_early(pacing="staggered", residency="host", remaining=50):
    """Return a runtime with one request, "a", that has draft KV alone."""
    runtime = Runtime(
        RuntimeSettings(
            pacing=pacing,
            residency=residency,
            draft_length=DRAFTS,
            max_verifies=1,
            staging_slots=1000,
            token_bytes=1000,
        )
    )
    spec = RequestSpec(rid="a", prompt=400, kept=100, dropped=300, remaining=remaining)
    runtime.arrive_early(spec)
    runtime.started = ()
    return runtime


def planned(runtime, **more):
    """Return one plan, with as much memory as wanted unless ``more`` says otherwise.

    Every prefetch has arrived by the next one.
    """
    usual = {"free_slots": 10**6, "host_slots": 10**6, "rows": len(runtime.tracks)}
    usual["arrived"] = runtime.started
    plan = runtime.plan(SchedulerInput(**{**usual, **more}))
    runtime.started = tuple(each.rid for each in plan.stage_ins)
    if any(isinstance(action, Verify) for action in plan.rows.values()):
        drafted = DRAFTS if "a" in plan.rows else 0
        runtime.report([RowResult("a", drafted=drafted, emitted=1)])
    return plan


def verified_after(runtime):
    """Plan until "a" is verified."""
    for _ in range(200):
        plan = planned(runtime)
        if isinstance(plan.rows["a"], Verify):
            return True
        assert isinstance(plan.rows["a"], Wait), "all it may draft is drafted"
    return False


@pytest.mark.parametrize("pacing", ["staggered", "lockstep", "sequential"])
@pytest.mark.parametrize("residency", ["host", "auto"])
def test_it_drafts_waits_and_is_verified_once_its_residual_kv_is_there(
    pacing, residency
):
    runtime = started_early(pacing, residency)
    # A plain request beside it goes on whatever happens.
    runtime.arrive(
        RequestSpec(
            rid="b", prompt=9, kept=0, dropped=0, remaining=999, compressible=False
        )
    )
    rows = [planned(runtime).rows["a"] for _ in range(DRAFTS + 90)]
    assert all(isinstance(row, Draft) for row in rows[:DRAFTS])
    assert all(isinstance(row, Wait) for row in rows[DRAFTS:])
    # Neither a full device nor requests that wait move what is not there.
    for world in ({"free_slots": 0}, {"blocked": True}, {"complete": ("b", "gone")}):
        plan = planned(runtime, **world)
        assert plan.moves == ()
        assert isinstance(plan.rows["b"], Plain)
    plan = planned(runtime, complete=("a",))
    assert plan.moves == (Complete("a"),)
    runtime.refused(plan.moves[0])
    plan = planned(runtime, complete=("a",))
    runtime.moved(plan.moves[0], "segments")
    assert runtime.tracks["a"].residency is Residency.HOST
    assert planned(runtime, complete=("a",)).moves == (), "it is taken over once"
    assert verified_after(runtime)
    assert isinstance(planned(runtime).rows["a"], Draft)
    runtime.leave("a")
    assert runtime.figures()["requests_store"] == 0


@pytest.mark.parametrize("ends", [False, True])
def test_few_tokens_are_as_many_drafts(ends):
    """One token is verified without a draft; a stop token ends the drafts."""
    runtime = started_early(remaining=50 if ends else 1)
    if ends:
        assert isinstance(planned(runtime).rows["a"], Draft)
        runtime.report([RowResult("a", drafted=1, ended=True)])
    assert isinstance(planned(runtime).rows["a"], Wait)
    runtime.moved(*planned(runtime, complete=("a",)).moves)
    assert verified_after(runtime)


@pytest.mark.parametrize("accepted", [0, DRAFTS - 1])
def test_one_that_was_verified_elsewhere_can_be_verified_here(accepted):
    runtime = started_early()
    for _ in range(3):
        runtime.record_verdict("a", accepted + 1, DRAFTS - 1, accepted, 0.01)
        rows = [planned(runtime).rows["a"] for _ in range(DRAFTS + 9)]
        drafts = sum(isinstance(row, Draft) for row in rows)
        assert 1 <= drafts <= DRAFTS, "one more than is sent, and no more than fit"
    assert runtime.tracks["a"].remaining == 50 - 3 * (accepted + 1)
    runtime.moved(*planned(runtime, complete=("a",)).moves)
    rows = [planned(runtime).rows["a"] for _ in range(200)]
    first = next(i for i, row in enumerate(rows) if isinstance(row, Verify))
    drafts += sum(isinstance(row, Draft) for row in rows[:first])
    assert drafts <= DRAFTS


def test_one_that_is_lost_leaves_nothing():
    runtime = started_early()
    planned(runtime)
    runtime.leave("a")
    assert planned(runtime, complete=("a",), rows=1).moves == ()
    assert not runtime.tracks
