"""Statistics of a request, and how they reach ``meta_info`` through the streamer."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vericache_patches import managers_tokenizer_manager as hook
from vericache_patches.entrypoints_openai_usage_processor import usage_of
from vericache_sglang.former_names import with_former_names
from vericache_sglang.observability.request_stats import KEY, RequestStats

rounds = st.lists(
    st.integers(1, 8).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))),
    max_size=12,
)


def test_two_rounds_and_a_move():
    stats = RequestStats(True, 4)
    stats.note_cycle(4, 4)
    stats.note_cycle(3, 1)
    stats.note_proposals(4, 1)
    stats.staged_bytes += 1024
    stats.moves["offload"] += 1
    assert stats.report() == with_former_names(
        "meta_info",
        {
            "enabled": True,
            "draft_length": 4,
            "cycles": 2,
            "drafted": 7,
            "accepted": 5,
            "inner_proposed": 4,
            "inner_accepted": 1,
            "accepted_histogram": [0, 1, 0, 0, 1],
            "staged_bytes": 1024,
            "kv_moves": {"offload": 1},
            "reported": False,
        },
    )


@settings(deadline=None)
@given(rounds)
def test_the_histogram_adds_up(counted):
    stats = RequestStats(True, 8)
    for drafted, accepted in counted:
        stats.note_cycle(drafted, accepted)
    report = stats.report()
    histogram = report["accepted_histogram"]
    assert sum(histogram) == report["cycles"] == len(counted)
    assert sum(n * times for n, times in enumerate(histogram)) == report["accepted"]
    assert report["accepted"] <= report["drafted"]


@pytest.mark.parametrize("cut", [slice(0, 5), slice(3, None), slice(0, 0)])
def test_any_cut_of_the_streamers_gives_the_totals_once(cut):
    stats = RequestStats(True, 4)
    stats.note_cycle(4, 2)
    assert stats[cut] == [stats.report()]


def test_a_cut_does_not_change_later():
    stats = RequestStats(True, 4)
    (first,) = stats[0:1]
    stats.note_cycle(4, 2)
    stats.moves["load"] += 1
    assert first["cycles"] == 0
    assert first["accepted_histogram"] == []
    assert first["kv_moves"] == {}


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


def test_the_last_figures_go_to_meta_info():
    reports = [[stats(1)], [stats(2), stats(3)]]
    meta_info, passed = update({KEY: reports}, index=1)
    assert meta_info[KEY] == stats(3)
    assert passed == [({}, (1, None), {})]


def stats(rounds=0, reported=True):
    """Return a request's statistics after so many draft-verify cycles."""
    known = RequestStats(True, 4)
    for _ in range(rounds):
        known.note_cycle(4, 2)
    return {**known.report(), "reported": reported}


def count(tokens, rounds, reported=True):
    """Return the token count that the hook puts into ``meta_info``."""
    given = {KEY: [[stats(rounds, reported)]]}
    return update(given, before={"completion_tokens": tokens})[0]["completion_tokens"]


def test_a_token_count_brings_the_statistics_that_were_asked_for_along():
    """A stream's ``usage`` is made of nothing else."""
    tokens = count(7, rounds=2)
    assert tokens == 7
    assert json.dumps(tokens) == "7"
    assert tokens.vericache == {
        "cycles": 2,
        "drafted": 8,
        "accepted": 4,
        "staged_bytes": 0,
    }
    assert not hasattr(count(7, rounds=2, reported=False), "vericache")


@pytest.mark.parametrize("reported", [(), (0,), (2,), (0, 1, 2)])
def test_sums_of_token_counts_carry_sums(reported):
    counts = [count(7, n, reported=n in reported) for n in range(3)]
    total = sum(counts)
    assert total == 21
    if reported:
        assert total.vericache["cycles"] == sum(reported)
        assert total.vericache["drafted"] == 4 * sum(reported)
    assert hasattr(total, "vericache") is bool(reported)
    assert sum(counts) / 2 + 0.5 == counts[2] + 4.0 == 11.0


@pytest.mark.sglang
def test_usage_of_any_answer_holds_them():
    """Whole answers and streams, through SGLang's own sums."""
    processor = pytest.importorskip(
        "sglang.srt.entrypoints.openai.usage_processor"
    ).UsageProcessor
    whole = processor.calculate_token_usage

    def hooked(**given):
        return usage_of(whole, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "calculate_token_usage", staticmethod(hooked))
        counts = {i: count(7, rounds=i) for i in range(3)}
        answers = [
            {"meta_info": {"completion_tokens": n, "prompt_tokens": 5}}
            for n in counts.values()
        ]
        prompts = dict.fromkeys(counts, 5)
        nothing = dict.fromkeys(counts, 0)
        for usage in (
            processor.calculate_response_usage(answers, n_choices=3),
            processor.calculate_streaming_usage(prompts, nothing, counts, nothing, 3),
        ):
            assert usage.model_dump()["vericache"]["cycles"] == 3
            assert json.loads(usage.model_dump_json())["total_tokens"] == 26
        plain = processor.calculate_response_usage(
            [{"meta_info": {"completion_tokens": 7, "prompt_tokens": 5}}]
        )
    assert "vericache" not in plain.model_dump()


@pytest.mark.parametrize("entry", [None, [], [None]])
def test_where_there_are_none_the_last_ones_stay(entry):
    meta_info, _ = update({KEY: [entry]}, before={KEY: {"cycles": 3}})
    assert meta_info == {KEY: {"cycles": 3}}


def test_what_others_add_is_upstreams_business():
    other = [[1, 2]]
    meta_info, passed = update({"other": other, KEY: [[stats(1)]]})
    assert passed[0][0] == {"other": other}
    assert meta_info[KEY] == stats(1)
    meta_info, passed = update({"other": other})
    assert passed[0][0] == {"other": other}
    assert meta_info == {}
