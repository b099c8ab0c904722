"""The bounded stagger: every request once, no limit exceeded, nobody starves."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.scheduling.plan import (
    Draft,
    Limits,
    Phase,
    Plain,
    RowView,
    Staged,
    Verify,
    Wait,
)
from vericache_sglang.scheduling.stagger import first_target, plan_iteration

LIMITS = Limits(max_verifies=2, max_splits=1, staging_spans=(100,), lead=2)


def drafting(rid="r", **more):
    given_values = {
        "drafts": 0,
        "target": 4,
        "cap": 4,
        "complement": 40,
        "staged": Staged.ABSENT,
        **more,
    }
    return RowView(rid=rid, phase=Phase.DRAFTING, **given_values)


def only(row, limits=LIMITS):
    return plan_iteration([row], limits)


def test_a_plain_row_is_decoded_plainly_and_split_afterwards():
    plan = only(RowView(rid="r", phase=Phase.PLAIN, splittable=True))
    assert plan.rows == (Plain("r"),)
    assert [split.rid for split in plan.splits] == ["r"]


def test_a_fresh_row_drafts_and_is_not_staged_yet():
    plan = only(drafting())
    assert plan.rows == (Draft("r"),)
    assert plan.stage_ins == ()


def test_staging_starts_lead_iterations_before_the_target():
    started = [bool(only(drafting(drafts=d)).stage_ins) for d in range(4)]
    assert started == [False, False, True, True]


def test_a_due_and_staged_row_is_verified():
    ready = drafting(drafts=4, staged=Staged.READY)
    assert only(ready).rows == (Verify("r"),)


def test_a_staged_row_that_is_not_due_drafts_on():
    ready = drafting(drafts=3, staged=Staged.READY)
    assert only(ready).rows == (Draft("r"),)


def test_a_late_reload_slips_then_waits():
    # The target is 4 but the cap leaves room: draft on rather than wait.
    loading = drafting(drafts=4, cap=6, staged=Staged.LOADING)
    assert only(loading).rows == (Draft("r"),)
    assert only(replace(loading, drafts=6)).rows == (Wait("r"),)


def test_a_stop_token_makes_a_row_due_at_once():
    closed = drafting(drafts=1, cap=1, staged=Staged.READY)
    assert only(closed).rows == (Verify("r"),)


def test_one_token_left_is_verified_without_drafts():
    last = drafting(drafts=0, cap=0, staged=Staged.READY)
    assert only(last).rows == (Verify("r"),)


def test_a_row_whose_tokens_are_all_out_is_left_alone():
    over = drafting(drafts=0, cap=0, staged=Staged.READY, over=True)
    plan = only(over)
    assert plan.rows == (Wait("r"),)
    assert plan.stage_ins == ()


def test_the_longest_waiting_row_is_verified_first():
    rows = [
        drafting(rid=str(i), drafts=4, staged=Staged.READY, waited=i) for i in range(4)
    ]
    plan = plan_iteration(rows, LIMITS)
    assert plan.rows == (Wait("0"), Wait("1"), Verify("2"), Verify("3"))


def test_a_small_reload_does_not_overtake_a_large_one():
    large = drafting(rid="large", drafts=4, complement=90, waited=1)
    small = drafting(rid="small", drafts=4, complement=10)
    limits = replace(LIMITS, staging_spans=(50,))
    assert plan_iteration([small, large], limits).stage_ins == ()


@st.composite
def views(draw, rid):
    phase = draw(st.sampled_from(Phase))
    cap = draw(st.integers(0, 8))
    return RowView(
        rid=rid,
        phase=phase,
        drafts=draw(st.integers(0, cap)),
        target=draw(st.integers(1, 8)),
        cap=cap,
        staged=draw(st.sampled_from(Staged)),
        complement=draw(st.integers(1, 60)),
        splittable=draw(st.booleans()),
        waited=draw(st.integers(0, 3)),
        over=draw(st.booleans()),
    )


@st.composite
def iterations(draw):
    rows = [draw(views(str(i))) for i in range(draw(st.integers(0, 12)))]
    limits = Limits(
        max_verifies=draw(st.integers(1, 4)),
        max_splits=draw(st.integers(1, 3)),
        staging_spans=tuple(draw(st.lists(st.integers(1, 100), max_size=4))),
        lead=draw(st.integers(1, 8)),
    )
    return rows, limits


@given(iterations())
def test_every_request_has_one_action_and_no_limit_is_exceeded(iteration):
    rows, limits = iteration
    plan = plan_iteration(rows, limits)
    assert [action.rid for action in plan.rows] == [row.rid for row in rows]
    verified = {a.rid for a in plan.rows if isinstance(a, Verify)}
    assert len(verified) <= limits.max_verifies
    assert len(plan.splits) <= limits.max_splits
    by_rid = {row.rid: row for row in rows}
    assert all(by_rid[rid].staged is Staged.READY for rid in verified)
    assert len({s.rid for s in plan.stage_ins}) == len(plan.stage_ins)
    spans = list(limits.staging_spans)
    for stage_in in plan.stage_ins:  # first fit, as the region will do it
        row = by_rid[stage_in.rid]
        assert row.staged is Staged.ABSENT
        fit = next(i for i, size in enumerate(spans) if size >= row.complement)
        spans[fit] -= row.complement


@given(iterations())
def test_equal_inputs_give_equal_plans(iteration):
    rows, limits = iteration
    assert plan_iteration(rows, limits) == plan_iteration(list(rows), limits)


@given(st.integers(0, 100), st.integers(1, 40), st.integers(1, 64))
def test_first_targets_are_valid_and_spread(newcomer, count, draft_length):
    assert 1 <= first_target(newcomer, count, draft_length) <= draft_length
    targets = {first_target(i, count, draft_length) for i in range(count)}
    assert len(targets) == min(count, draft_length)


def test_no_request_starves_with_one_verify_slot():
    """Play 200 iterations of six requests; reloads take three iterations."""
    limits = Limits(max_verifies=1, max_splits=1, staging_spans=(80,), lead=3)
    rows = [drafting(rid=str(i), target=first_target(i, 6, 4)) for i in range(6)]
    loading, verified = {}, dict.fromkeys("012345", 0)
    for _ in range(200):
        used = sum(r.complement for r in rows if r.staged is not Staged.ABSENT)
        plan = plan_iteration(rows, replace(limits, staging_spans=(80 - used,)))
        for stage_in in plan.stage_ins:
            loading[stage_in.rid] = 3
        after = []
        for row, action in zip(rows, plan.rows, strict=True):
            if row.rid in loading:
                loading[row.rid] -= 1
                done = loading[row.rid] == 0
                row = replace(row, staged=Staged.READY if done else Staged.LOADING)
                if done:
                    del loading[row.rid]
            if isinstance(action, Verify):
                verified[row.rid] += 1
                row = replace(row, drafts=0, target=4, staged=Staged.ABSENT, waited=0)
            elif isinstance(action, Draft):
                row = replace(row, drafts=row.drafts + 1, waited=0)
            else:
                row = replace(row, waited=row.waited + 1)
            after.append(row)
        rows = after
    assert min(verified.values()) >= 0.8 * max(verified.values()) > 0
