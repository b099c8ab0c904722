"""What does not add up costs what it must, and no more: one row per place.

Without SGLang's strict memory checks while busy, with which every error ends the
process; those of an idle server stay on, so what is left over ends it.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    *("--max-total-tokens", "12000"),
)
LONG = {"max_new_tokens": 40, "ignore_eos": True}
HELD = ("kept_slots", "staging_slots", "staging_bytes", "host_bytes", "running")

CACHE, REQUEST, ALL = "cache_inconsistencies", "request_errors", "iteration_errors"
KINDS = (CACHE, REQUEST, ALL)
EXTENDED = pytest.mark.extended


@pytest.fixture(scope="module")
def prompts():
    return record_prompts(load_tokenizer(MODEL), [300, 700, 1100, 600], 7)


@pytest.fixture(scope="module")
def wanted(prompts):
    wave = {"prompts": prompts, "params": [greedy(40, ignore_eos=True)] * len(prompts)}
    return [answer["ids"] for answer in run(PLAIN, MODEL, [wave])["waves"][0]]


@contextmanager
def served(folder, *flags):
    where = folder / "where"
    where.write_text("")
    environment = {
        **faulty("inconsistent"),
        "VERICACHE_TEST_WHERE": str(where),
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0",
    }
    live = LiveServer(folder, *FLAGS, *flags, environment=environment)
    live.where = where
    try:
        yield live.wait()
    finally:
        live.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("inconsistent")) as live:
        yield live


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    flags = ("--tp-size", "2", "--chunked-prefill-size", "256")
    with served(tmp_path_factory.mktemp("ranks"), *flags) as live:
        yield live


@pytest.fixture(scope="module")
def ranks_in_turn(tmp_path_factory):
    flags = ("--tp-size", "2", "--disable-overlap-schedule")
    with served(tmp_path_factory.mktemp("in_turn"), *flags) as live:
        yield live


def inject(server, row):
    """Have calls fail; return the counters of before."""
    server.where.write_text("")
    server.flush()
    before = server.settle()
    server.where.write_text(row)
    return before


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
    assert all(answer["meta_info"]["vericache"]["cycles"] for answer in answers)
    assert server.process.poll() is None


def extended(*rows):
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=EXTENDED)
        for row in rows
    ]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        *(("look-up", CACHE), ("prefetch", REQUEST), ("outcome", ALL)),
        *extended(
            ("compress", ALL),
            ("plan", ALL),
            ("ledger", CACHE),
            ("index", ALL),
            ("move", ALL),
            ("rows", ALL),
        ),
        *extended(("sampling", ALL), ("end", ALL), ("release", ALL)),
    ],
)
def test_no_request_is_lost_and_every_answer_is_right(
    server, prompts, wanted, row, kind
):
    expect_recovery(server, prompts, wanted, row, kind)


def expect_recovery(server, prompts, wanted, row, kind):
    before = inject(server, row)
    for _ in range(2):
        answers = server.generate(prompts, **LONG)
        assert [answer["output_ids"] for answer in answers] == wanted
    found = grown(before, server.settle())
    assert found[kind] > 0, "nothing was injected"
    assert not any(found[other] for other in KINDS if other not in (kind, CACHE))
    expect_sound(server, prompts, wanted)


def test_a_request_without_a_state_is_aborted_alone(server, prompts, wanted):
    before, ended = inject(server, "arrival"), []
    for prompt, ids in zip(prompts, wanted, strict=True):
        try:
            assert server.generate(prompt, **LONG)["output_ids"] == ids
        except HTTPError as error:
            ended.append(error.code)
    assert ended == [500]
    assert grown(before, server.settle()) == {CACHE: 0, REQUEST: 1, ALL: 0}
    expect_sound(server, prompts, wanted)


def test_what_fails_every_time_ends_no_server(server, prompts, wanted):
    """A request is prefilled again, and not planned then."""
    before = inject(server, "always")
    for prompt, ids in zip(prompts, wanted, strict=True):
        assert server.generate(prompt, **LONG)["output_ids"] == ids
    assert grown(before, server.settle())[ALL] >= len(prompts)
    expect_sound(server, prompts, wanted)


@pytest.mark.parametrize(
    "row",
    [
        # On one rank: in its choice of rows, before the forward; in its sampling, after
        # it; in what concerns one request, which the other rank knows nothing of.
        "sampling@1",
        *extended("rows@0", "prefetch@1"),
        *extended("plan"),  # on all ranks alike
        # A rank that matches less has chosen another batch by then.
        *extended("look-up@1"),
    ],
)
def test_ranks_recover_together(ranks, prompts, wanted, row):
    expect_recovery(ranks, prompts, wanted, row, ALL)


@EXTENDED
def test_ranks_recover_together_without_overlap(ranks_in_turn, prompts, wanted):
    expect_recovery(ranks_in_turn, prompts, wanted, "outcome@1", ALL)


@EXTENDED
@pytest.mark.parametrize("which", ["server", "ranks"])
def test_errors_at_any_time_cost_no_answer(which, request, prompts, wanted):
    """A request is prefilled again, or aborted after its second error."""
    server = request.getfixturevalue(which)
    before = inject(server, "anywhere")

    def ask(i):
        try:
            return (
                server.generate(prompts[i % 4], **LONG)["output_ids"] == wanted[i % 4]
            )
        except HTTPError as error:
            return error.code

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(ask, range(40)))
    assert set(told) <= {True, 500}
    assert told.count(True) > 13
    assert grown(before, server.settle())[ALL] > 3
    expect_sound(server, prompts, wanted)


@EXTENDED
def test_what_fails_every_time_ends_no_rank(ranks, prompts, wanted):
    before = inject(ranks, "always@1")
    for prompt, ids in zip(prompts, wanted, strict=True):
        assert ranks.generate(prompt, **LONG)["output_ids"] == ids
    assert grown(before, ranks.settle())[ALL] >= len(prompts)
    expect_sound(ranks, prompts, wanted)
