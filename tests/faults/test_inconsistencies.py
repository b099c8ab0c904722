"""What does not add up costs what it must, and no more: one row per place.

Without SGLang's strict memory checks while busy, with which every error ends the
process; those of an idle server stay on, so what is left over ends it.
"""

from urllib.error import HTTPError

import pytest
from live_server import MODEL, LiveServer, faulty, run

from vericache_sglang.evaluation.lossless import greedy
from vericache_sglang.evaluation.matrix import PLAIN
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

pytestmark = pytest.mark.server

FLAGS = (
    *("--vericache-min-prompt", "64", "--vericache-draft-length", "8"),
    *("--vericache-residency", "host", "--vericache-compressor", "keynorm"),
    *("--max-total-tokens", "12000", "--sleep-on-idle"),
)
LONG = {"max_new_tokens": 40, "ignore_eos": True}
HELD = ("kept_slots", "staging_slots", "staging_bytes", "host_bytes", "running")

CACHE, REQUEST, ALL = "cache_inconsistencies", "request_errors", "iteration_errors"
KINDS = (CACHE, REQUEST, ALL)


@pytest.fixture(scope="module")
def prompts():
    return record_prompts(load_tokenizer(MODEL), [300, 700, 1100, 600], 7)


@pytest.fixture(scope="module")
def wanted(prompts):
    wave = {"prompts": prompts, "params": [greedy(40, ignore_eos=True)] * len(prompts)}
    return [answer["ids"] for answer in run(PLAIN, MODEL, [wave])["waves"][0]]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inconsistent")
    where = folder / "where"
    where.write_text("")
    environment = {
        **faulty("inconsistent"),
        "VERICACHE_TEST_WHERE": str(where),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0",
    }
    live = LiveServer(folder, *FLAGS, environment=environment)
    live.where = where
    try:
        yield live.wait()
    finally:
        live.close()


@pytest.fixture
def injected(server):
    """Return a function that has calls fail; it returns the counters of before."""

    def begin(row):
        server.flush()
        before = server.settle()
        server.where.write_text(row)
        return before

    yield begin
    server.where.write_text("")


def grown(before, after):
    return {kind: after[kind] - before[kind] for kind in KINDS}


def expect_sound(server, prompts, wanted):
    """Nothing is held, and the next requests draft and are answered as by plain."""
    server.where.write_text("")
    counters = server.settle()
    assert {name: counters[name] for name in HELD} == dict.fromkeys(HELD, 0)
    server.flush()
    answers = server.generate(prompts, **LONG)
    assert [answer["output_ids"] for answer in answers] == wanted
    assert all(answer["meta_info"]["vericache"]["rounds"] for answer in answers)
    assert server.process.poll() is None


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        *(("look-up", CACHE), ("ledger", CACHE), ("prefetch", REQUEST)),
        *(
            ("index", ALL),
            ("compress", ALL),
            ("move", ALL),
            ("plan", ALL),
            ("rows", ALL),
        ),
        *(("rows", ALL), ("sampling", ALL), ("outcome", ALL)),
        *(("end", ALL), ("release", ALL)),
    ],
)
def test_no_request_is_lost_and_every_answer_is_right(
    server, injected, prompts, wanted, row, kind
):
    before = injected(row)
    for _ in range(2):
        answers = server.generate(prompts, **LONG)
        assert [answer["output_ids"] for answer in answers] == wanted
    found = grown(before, server.settle())
    assert found[kind] > 0, "nothing was injected"
    assert not any(found[other] for other in KINDS if other not in (kind, CACHE))
    expect_sound(server, prompts, wanted)


def test_a_request_without_a_state_is_aborted_alone(server, injected, prompts, wanted):
    before, ended = injected("arrival"), []
    for prompt, ids in zip(prompts, wanted, strict=True):
        try:
            assert server.generate(prompt, **LONG)["output_ids"] == ids
        except HTTPError as error:
            ended.append(error.code)
    assert ended == [500]
    assert grown(before, server.settle()) == {CACHE: 0, REQUEST: 1, ALL: 0}
    expect_sound(server, prompts, wanted)


def test_what_fails_every_time_ends_no_server(server, injected, prompts, wanted):
    """A request is prefilled again, and not planned then."""
    before = injected("always")
    for prompt, ids in zip(prompts, wanted, strict=True):
        assert server.generate(prompt, **LONG)["output_ids"] == ids
    assert grown(before, server.settle())[ALL] >= len(prompts)
    expect_sound(server, prompts, wanted)
