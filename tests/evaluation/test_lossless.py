"""The comparison of answers, and systems described by fields."""

import pytest

from vericache_sglang.evaluation.lossless import (
    Mismatch,
    bodies,
    compare,
    differing,
    greedy,
    tokens,
)
from vericache_sglang.evaluation.matrix import (
    COVERING,
    DRAFTED,
    DRAFTERS,
    METHODS,
    PLACES,
    drafters,
    full,
    methods,
)
from vericache_sglang.evaluation.systems import described
from vericache_sglang.serving.launch import split_arguments


def answer(ids, reason="length"):
    return {"ids": list(ids), "finish_reason": {"type": reason}}


@pytest.mark.parametrize(
    ("wanted", "got", "position", "parts"),
    [
        (answer([1, 2, 3]), answer([1, 9, 3]), 1, ("[2, 3]", "[9, 3]")),
        (answer([1, 2]), answer([1, 2, 3]), 2, ("[]", "[3]")),
        (answer([]), answer([5]), 0, ("[]", "[5]")),
        (
            answer([1], "stop"),
            answer([1]),
            -1,
            ("{'type': 'stop'}", "{'type': 'length'}"),
        ),
    ],
)
def test_the_first_difference_is_found(wanted, got, position, parts):
    same = answer([4, 4])
    found = compare(
        {"waves": [[same], [same, wanted]]}, {"waves": [[same], [same, got]]}
    )
    assert found == [Mismatch(1, 1, position, *parts)]
    assert differing([same, wanted], [same, got]) == 1


def test_equal_answers_have_none_and_missing_ones_are_an_error():
    run = {"waves": [[answer([1, 2]), answer([3])]]}
    assert compare(run, run) == []
    assert tokens(run) == 3
    with pytest.raises(ValueError, match="zip"):
        compare(run, {"waves": [[answer([1, 2])]]})


def test_a_wave_as_bodies():
    wave = {"prompts": ["a", "b"], "params": [greedy(3), greedy(4, ignore_eos=True)]}
    wave["more"] = {"return_logprob": True}
    assert bodies(wave)[1] == {
        "text": "b",
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": 4,
            "ignore_eos": True,
        },
        "return_logprob": True,
    }


def test_fields_become_flags():
    settings = {"keep": 0.5, "compressor": "kivi:bits=4"}
    engine = {"page_size": 16, "disable_radix_cache": True}
    system = described("x", settings, engine)
    config, rest = split_arguments(system.flags)
    assert (config.keep, config.compressor) == (0.5, "kivi:bits=4")
    assert rest == ["--page-size", "16", "--disable-radix-cache"]
    assert described("plain", None, engine).flags[0] == "--disable-vericache"


def test_every_setting_of_the_matrix_is_one_and_told_apart():
    rows = [*full(), *methods(), *drafters()]
    assert len({row.name for row in rows}) == len(rows)
    proposing = len(DRAFTERS) * len(DRAFTED) + 1
    compressing = len(METHODS) * len(PLACES)
    assert len(rows) == len(COVERING) + 1 + 16 + compressing + proposing
    for row in drafters():
        config, _ = split_arguments(row.flags)
        assert config.proposals > 0
    for row in rows:
        config, _ = split_arguments(row.flags)
        assert config is not None, row.name
