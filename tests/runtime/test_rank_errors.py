"""An error of some ranks is one of all, wherever it is raised; real gloo ranks."""

from types import SimpleNamespace

import pytest
from forked_ranks import Ranks
from hypothesis import given
from hypothesis import strategies as st

from vericache_sglang.errors import LostRankError, RankError
from vericache_sglang.runtime.tp_sync import WIDTH, TensorParallelSync
from vericache_sglang.sampling.profile import Profile, SamplingRule
from vericache_sglang.scheduling.estimates import Estimates


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    three = Ranks(3, tmp_path_factory.mktemp("ranks"))
    yield three
    three.close()


def plan_and_forward(tp_sync, rank, ran, *, last):
    """Return the steps of one call of the worker; the forward is noted in ``ran``."""
    yield lambda: tp_sync.sync_inputs(5, [1] * (2 * WIDTH))
    yield lambda: tp_sync.mean_of_all(0.5)
    yield lambda: tp_sync.most(rank)
    with tp_sync.forward(last=last):
        ran.append("forward")
    yield lambda: None
    if last:
        return
    yield lambda: tp_sync.every(True)
    yield lambda: tp_sync.agree(last=True)
    yield lambda: None


STEPS, AFTER = 7, 3
"""Of ``plan_and_forward``, and the one that is the first after the forward."""


def iterate(group, rank, schedule):
    """Fail before the given step of each iteration, a number for every rank.

    Between two calls of the worker a request finishes, for which all ranks exchange.
    """
    tp_sync = TensorParallelSync(Estimates(), group)
    told = []
    for last, steps in schedule:
        ran, failed = [], False
        tp_sync.begin()
        try:
            calls = plan_and_forward(tp_sync, rank, ran, last=last)
            for at, call in enumerate(calls):
                if at == steps[rank]:
                    raise ZeroDivisionError
                call()
        except (ZeroDivisionError, RankError):
            tp_sync.fail()
            failed = True
        try:
            finished = tp_sync.every(True)
        except RankError:
            finished, failed = False, True
        met = tp_sync.sync_errors(failed)
        if met:
            tp_sync.recovered()
        told.append((ran, finished, met))
    return [*told, tp_sync.first(rank + 7)]


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.tuples(*[st.none() | st.integers(0, STEPS - 1)] * 3),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_ranks_that_fail_anywhere_meet_again(ranks, schedule):
    """No rank waits for another one, and none runs a forward without the others."""
    answers = ranks.call(iterate, schedule)
    assert answers == [answers[0]] * 3
    *iterations, after = answers[0]
    assert after == 7
    for (last, steps), (ran, finished, met) in zip(schedule, iterations, strict=True):
        steps = [at for at in steps if at is not None and at <= (AFTER if last else 9)]
        assert met is bool(steps)
        assert finished is not met
        assert ran == ([] if min(steps, default=9) < AFTER else ["forward"])


def fail_unseen(group, rank):
    """Fail between two calls of the worker; the next exchange tells, if it is one."""
    tp_sync = TensorParallelSync(Estimates(), group)
    if rank == 2:
        tp_sync.fail()
    found = tp_sync.sync_errors(failed=False)
    tp_sync.recovered()
    if rank == 0:
        tp_sync.fail()
    with pytest.raises(RankError, match=r"ranks \[0\] failed"):
        tp_sync.every(True)
    with pytest.raises(RankError, match="in this iteration"):
        tp_sync.first(1.0)
    again = tp_sync.sync_errors(failed=False)
    tp_sync.recovered()
    return found, again, tp_sync.sync_errors(failed=False)


def test_an_error_between_two_calls_is_told_with_the_next_exchange(ranks):
    assert ranks.call(fail_unseen) == [(True, True, False)] * 3


def break_forward(group, rank, of_several):
    tp_sync = (
        TensorParallelSync(Estimates(), group)
        if of_several
        else TensorParallelSync(Estimates())
    )
    with tp_sync.forward(last=True):
        raise ZeroDivisionError("in a layer")


def test_a_forward_that_fails_loses_its_rank_only_where_others_may_wait(ranks):
    answers = ranks.call(break_forward, True)
    assert all(isinstance(answer, LostRankError) for answer in answers)
    with pytest.raises(ZeroDivisionError):
        break_forward(None, 0, False)


def draw(tp_sync, rid):
    """Return the key of an unseeded request's noise."""
    parameters = SimpleNamespace(sampling_seed=None)
    state = SimpleNamespace(
        rid=rid,
        req=SimpleNamespace(sampling_params=parameters),
        profile=Profile(SamplingRule.COUPLED, seed=1),
    )
    tp_sync.same_noise(state)
    return state.profile.seed


def draw_unequally(group, rank):
    """Lose a request before it draws on rank 1; return the keys drawn later."""
    tp_sync = TensorParallelSync(Estimates(), group)
    if rank != 1:
        draw(tp_sync, "lost")
    tp_sync.sync_errors(failed=rank == 1)
    tp_sync.recovered()
    return [draw(tp_sync, "lost"), draw(tp_sync, "next")]


def test_ranks_draw_the_same_noise_after_an_error(ranks):
    answers = ranks.call(draw_unequally)
    assert answers == [answers[0]] * 3
    assert len(set(answers[0])) == 2
