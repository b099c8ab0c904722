"""Forwards are launched before the result of the last one is recorded."""

from pathlib import Path

import pytest
from live_server import faulty, run

from vericache_sglang.evaluation.lossless import compare, greedy
from vericache_sglang.evaluation.matrix import PLAIN, system
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def waves():
    prompts = record_prompts(load_tokenizer(MODEL), [700, 1500, 900], 7)
    return [{"prompts": prompts, "params": [greedy(80, ignore_eos=True)] * 3}]


@pytest.fixture(scope="module")
def plain(waves):
    return run(PLAIN, MODEL, waves)


def logged(path, waves, overlap):
    watched = system(
        "logged flights",
        draft_length=6,
        keep=0.25,
        engine={} if overlap else {"disable_overlap_schedule": True},
        environment={**faulty("logged_flights"), "VERICACHE_TEST_LOG": str(path)},
    )
    ours = run(watched, MODEL, waves)
    return ours, [line.split() for line in path.read_text().splitlines()]


def iterations(lines):
    """Yield the lines between every begin and its end."""
    inside = None
    for line in lines:
        if line[0] == "begin":
            inside = []
        elif line[0] == "end":
            yield inside
            inside = None
        elif inside is not None:
            inside.append(line)


@pytest.fixture(scope="module")
def overlapped(waves, tmp_path_factory):
    return logged(tmp_path_factory.mktemp("overlap") / "log", waves, overlap=True)


def test_under_overlap_nothing_is_waited_for_but_moves(overlapped, plain):
    ours, lines = overlapped
    assert compare(plain, ours) == []
    assert ours["state"]["cycles"] > 20
    seen = list(iterations(lines))
    waiting = [each for each in seen if any(line[0] == "record" for line in each)]
    assert len(seen) > 60
    for each in waiting:
        assert any(line[0] == "moves" for line in each), each
    assert len(waiting) < len(seen) / 4, "moves are rare"


def test_under_overlap_a_result_is_recorded_one_forward_late(overlapped):
    _, lines = overlapped
    order = [
        (what, int(rest[0])) for what, *rest in lines if what in ("launch", "record")
    ]
    place = {event: i for i, event in enumerate(order)}
    reported = [number for what, number in order if what == "record"]
    assert reported == sorted(reported), "in the order of the launches"
    late = [
        number
        for number in reported
        if ("launch", number + 1) in place
        and place["launch", number + 1] < place["record", number]
    ]
    early = [
        number
        for number in reported
        if ("launch", number + 2) in place
        and place["launch", number + 2] < place["record", number]
    ]
    assert len(late) > 0.7 * len(reported)
    assert not early, "two forwards were in flight when a third was launched"


@pytest.mark.extended
def test_without_overlap_a_result_is_recorded_at_once(tmp_path, waves, plain):
    ours, lines = logged(tmp_path / "log", waves, overlap=False)
    assert compare(plain, ours) == []
    in_flight = most = 0
    for what, *_ in lines:
        in_flight += (what == "launch") - (what == "record")
        if what == "begin":
            most = max(most, in_flight)
    assert most == 0
