"""The promise: the tokens plain SGLang emits, under every setting.

A covering subset of ``python -m vericache_sglang.bench lossless``; the prompts are real
(documents of the demo model and source code), the baseline is a plain SGLang server,
and SGLang's strict memory checks are on in both.
"""

from pathlib import Path

import pytest
from live_server import faulty, run

from vericache_sglang.evaluation.lossless import compare, waves
from vericache_sglang.evaluation.matrix import COVERING, PLAIN, system
from vericache_sglang.evaluation.systems import described
from vericache_sglang.evaluation.workload import load_tokenizer
from vericache_sglang.kv.segment_length import SEGMENT

MODEL = Path(__file__).parents[2] / "configs" / "demo-model"
USUAL = (
    "snapkv, keep 0.125, draft 32, page 16, chunks of 256",
    "on the device, no radix cache, no overlap, draft 16",
)
"""Both residencies and page sizes, with and without radix cache and overlap."""

HELD = ("kept_slots", "staging_slots", "host_bytes", "query_tails", "running")

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def requests():
    return waves(load_tokenizer(MODEL), prompts=8, longest=2000, seed=7)


@pytest.fixture(scope="module")
def plain(requests):
    return run(PLAIN, MODEL, requests)


def test_the_baseline_proves_something(plain):
    """Answers differ from each other and do not repeat one token."""
    answers = [answer["ids"] for wave in plain["waves"] for answer in wave]
    long = [ids for ids in answers if len(ids) >= 16]
    assert len(long) >= 20
    assert len({tuple(ids) for ids in long}) >= 0.7 * len(long)
    varied = sum(len(set(ids)) >= 8 for ids in long)
    assert varied >= 0.9 * len(long)


NAN = system(
    "scores all NaN, page 16, draft 4",
    compressor="test-nan",
    draft_length=4,
    keep=0.1,
    engine={"page_size": 16},
)


def rows():
    """Yield what is tried; the names in ``USUAL`` are not extended."""
    tried = {row.name: row for row in (*COVERING, NAN)}
    assert set(USUAL) <= tried.keys()
    for name, row in tried.items():
        marks = () if name in USUAL else pytest.mark.extended
        yield pytest.param(row, id=name, marks=marks)


@pytest.mark.parametrize("system", rows())
def test_tokens_are_identical(system, requests, plain):
    ours = run(system, MODEL, requests)
    assert compare(plain, ours) == []
    state = ours["state"]
    assert state["cycles"] > 20, "nothing was verified: this run proves nothing"
    assert state["compressions"] >= 10
    assert {name: state[name] for name in HELD} == dict.fromkeys(HELD, 0)


def extended(*values):
    return pytest.param(*values, marks=pytest.mark.extended)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("radix cache, page 16", {"page_size": 16}),
        extended(
            "no radix cache, no overlap",
            {"disable_radix_cache": True, "disable_overlap_schedule": True},
        ),
    ],
)
def test_tokens_are_identical_while_everything_moves(name, engine, requests, plain):
    """Random splits, offloads, pins, parks, resumes and unsplits all along."""
    environment = faulty("restless")
    restless = system(name, draft_length=8, engine=engine, environment=environment)
    ours = run(restless, MODEL, requests)
    assert compare(plain, ours) == []
    state = ours["state"]
    moves = ("compressions", "fallbacks", "offloads", "loads", "swap_outs", "swap_ins")
    made = {name: state[name] for name in moves}
    assert all(made.values()), str(made)
    assert {name: state[name] for name in HELD} == dict.fromkeys(HELD, 0)


@pytest.mark.extended
def test_tokens_are_identical_where_the_model_decides(requests, plain):
    """Whatever the throughput model chooses on this machine, nothing changes."""
    ours = run(system("auto", residency="auto", draft_length=16), MODEL, requests)
    assert compare(plain, ours) == []
    assert {name: ours["state"][name] for name in HELD} == dict.fromkeys(HELD, 0)


@pytest.mark.extended
def test_requests_with_one_prompt_share_its_residual(requests, plain):
    """Six answers to one prompt: one host copy, and most prefetches are shared.

    Where a compressor's choice is one request's own, whole segments are shared from the
    start, and the tokens behind them once the requests turn out to be equal.
    """
    prompt = max(requests[0]["prompts"], key=len)
    wave = {
        "prompts": [prompt] * 6,
        "params": [{"temperature": 0.0, "max_new_tokens": 96, "ignore_eos": True}] * 6,
    }
    wanted = run(PLAIN, MODEL, [wave])
    behind = len(load_tokenizer(MODEL).encode(prompt)) % SEGMENT
    shared = len(load_tokenizer(MODEL).encode(prompt)) - behind
    for compressor, copies, held in (
        ("keynorm", 1, 2.5),
        ("snapkv", shared + 6 * behind, shared + 2.5 * behind),
    ):
        settings = {"draft_length": 8, "max_verifies": 6, "compressor": compressor}
        ours = run(system("one prompt", **settings), MODEL, [wave])
        assert compare(wanted, ours) == []
        state = ours["state"]
        assert state["shared_prefetches"] > state["cycles"] // 3
        alone = state["offloaded_bytes"] / copies
        assert state["peak_host_bytes"] < held * alone, "held once, and one being made"


@pytest.mark.extended
def test_more_requests_than_memory_all_finish(requests):
    """Twenty requests, a pool of a quarter of what eight at once would take."""
    texts = sorted(requests[0]["prompts"], key=len)[-10:]
    wave = {
        "prompts": [f"{text}{i}" for i in range(2) for text in texts],
        "params": [{"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}] * 20,
    }
    wide = run(PLAIN, MODEL, [wave])
    tokenizer = load_tokenizer(MODEL)
    longest = max(len(tokenizer.encode(text)) for text in texts) + 48
    engine = {"max_total_tokens": 2 * longest, "max_running_requests": 8}
    for residency in ("host", "auto"):
        tight = system(residency, residency=residency, draft_length=8, engine=engine)
        ours = run(tight, MODEL, [wave])
        assert compare(wide, ours) == []
        assert {name: ours["state"][name] for name in HELD} == dict.fromkeys(HELD, 0)


@pytest.mark.extended
def test_stock_attention_gives_the_same_tokens(requests, plain):
    """The baseline uses our CPU attention too; SGLang's own agrees with it, once."""
    first = requests[0]
    short = [i for i, text in enumerate(first["prompts"]) if len(text) < 3000][:6]
    wave = {key: [first[key][i] for i in short] for key in ("prompts", "params")}
    engine = {"attention_backend": "torch_native"}
    stock = run(described("stock", None, engine), MODEL, [wave])
    assert compare({"waves": [[plain["waves"][0][i] for i in short]]}, stock) == []


@pytest.mark.extended
def test_drafting_and_verifying_share_forwards(requests, plain):
    """Three full requests fit the pool; eight run at once, and verify beside drafts."""
    prompt = max(requests[0]["prompts"][:8], key=len)
    tokenizer = load_tokenizer(MODEL)
    length = len(tokenizer.encode(prompt, add_special_tokens=False))
    wave = {
        "prompts": [f"{prompt}{i}" for i in range(12)],
        "params": [
            {"temperature": 0.0, "max_new_tokens": 160, "ignore_eos": True}
            for _ in range(12)
        ],
    }
    budget = {"max_total_tokens": 3 * (length + 170)}
    full = run(described("full", None, budget), MODEL, [wave])
    settings = {
        "compressor": "snapkv",  # requests with one residual KV are verified together
        "keep": 0.2,
        "draft_length": 4,
        "max_verifies": 2,
        "min_prompt": 64,
        "staging_tokens": 4 * length,
        "residency": "host",
    }
    ours = run(described("ours", settings, budget), MODEL, [wave])
    assert compare(full, ours) == []
    state = ours["state"]
    assert state["peak_drafting"] >= 8
    # Two rows are verified at once at most: were all such forwards mixed, 0.5 or more.
    # Not a share of all iterations: a slow link adds some without verifications.
    assert state["mixed_iterations"] >= 0.4 * state["cycles"]
