"""Statistics of a request, and how they reach ``meta_info`` through the streamer."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_patches import managers_tokenizer_manager as hook
from vericache_sglang.observability.request_stats import KEY, RequestStats

rounds = st.lists(
    st.integers(1, 8).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))),
    max_size=12,
)


def test_two_rounds_and_a_move():
    stats = RequestStats(True, 4)
    stats.note_round(4, 4)
    stats.note_round(3, 1)
    stats.staged_bytes += 1024
    stats.moves["offload"] += 1
    assert stats.report() == {
        "enabled": True,
        "draft_length": 4,
        "rounds": 2,
        "drafted": 7,
        "accepted": 5,
        "accepted_histogram": [0, 1, 0, 0, 1],
        "staged_bytes": 1024,
        "residency_changes": {"offload": 1},
        "reported": False,
    }


@settings(deadline=None)
@given(rounds)
def test_the_histogram_adds_up(counted):
    stats = RequestStats(True, 8)
    for drafted, accepted in counted:
        stats.note_round(drafted, accepted)
    report = stats.report()
    histogram = report["accepted_histogram"]
    assert sum(histogram) == report["rounds"] == len(counted)
    assert sum(n * times for n, times in enumerate(histogram)) == report["accepted"]
    assert report["accepted"] <= report["drafted"]


@pytest.mark.parametrize("cut", [slice(0, 5), slice(3, None), slice(0, 0)])
def test_any_cut_of_the_streamers_gives_the_totals_once(cut):
    stats = RequestStats(True, 4)
    stats.note_round(4, 2)
    assert stats[cut] == [stats.report()]


def test_a_cut_does_not_change_later():
    stats = RequestStats(True, 4)
    (first,) = stats[0:1]
    stats.note_round(4, 2)
    stats.moves["pin"] += 1
    assert first["rounds"] == 0
    assert first["accepted_histogram"] == []
    assert first["residency_changes"] == {}


def update(customized_info, index=0, before=None):
    """Run the hook around a stand-in that keeps what it was given."""
    meta_info, passed = dict(before or {}), []

    def original(manager, meta_info, state, others, *rest, **more):
        passed.append((others, rest, more))

    state = SimpleNamespace()
    hook.update_request_meta_info(
        original, None, meta_info, state, customized_info, index, None
    )
    return meta_info, passed


def test_the_hook_uses_the_same_name():
    assert hook.KEY == KEY


def test_the_last_figures_go_to_meta_info():
    reports = [[{"rounds": 1}], [{"rounds": 2}, {"rounds": 3}]]
    meta_info, passed = update({KEY: reports}, index=1)
    assert meta_info[KEY] == {"rounds": 3}
    assert passed == [({}, (1, None), {})]


def test_the_token_count_brings_them_along():
    """A stream's ``usage`` is made of nothing else."""
    meta_info, _ = update({KEY: [[{"rounds": 2}]]}, before={"completion_tokens": 7})
    assert meta_info["completion_tokens"] == 7
    assert json.dumps(meta_info["completion_tokens"]) == "7"
    assert meta_info["completion_tokens"].vericache == {"rounds": 2}


@pytest.mark.parametrize("entry", [None, [], [None]])
def test_where_there_are_none_the_last_ones_stay(entry):
    meta_info, _ = update({KEY: [entry]}, before={KEY: {"rounds": 3}})
    assert meta_info == {KEY: {"rounds": 3}}


def test_what_others_add_is_upstreams_business():
    other = [[1, 2]]
    meta_info, passed = update({"other": other, KEY: [[{"rounds": 1}]]})
    assert passed[0][0] == {"other": other}
    assert meta_info[KEY] == {"rounds": 1}
    meta_info, passed = update({"other": other})
    assert passed[0][0] == {"other": other}
    assert meta_info == {}
