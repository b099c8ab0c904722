"""Requests that draft on stored draft KV while their residual KV is read, then verify.

The link to the store is EMULATED: reads from a folder of this machine are delayed.
"""

import json

import pytest
from live_server import MODEL, LiveServer, faulty

from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

pytestmark = pytest.mark.server

FLAGS = (
    *("--vericache-min-prompt", "64", "--vericache-draft-length", "8"),
    *("--vericache-residency", "host", "--vericache-compressor", "keynorm"),
    *("--vericache-draft-first", "on", "--hicache-storage-backend", "file"),
)
PAGES = ("--page-size", "16")
PLANES = "split-planes:exponent_bits=3,mantissa_bits=1"
BOTH = ("--enable-deterministic-inference", "--max-total-tokens", "60000")
HELD = ("kept_slots", "staging_slots", "running", "cache_draft_slots_used")
RETRACTED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}
REGEX = r"[a-z]+ ([0-9]{1,3} ?){4}"
KINDS = (
    {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True},
    {"temperature": 0.9, "max_new_tokens": 24, "sampling_seed": 7},
    {"temperature": 0.0, "max_new_tokens": 24, "regex": REGEX},
    {"temperature": 0.0, "max_new_tokens": 1},
)
PENALISED = {**KINDS[0], "presence_penalty": 0.4, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def bodies():
    """Return every kind of request about documents of 2 to 5 whole segments."""
    prompts = record_prompts(load_tokenizer(MODEL), [2700, 1100, 1700], 5)
    return [
        *(
            {
                **{"text": prompts, "sampling_params": [kind] * len(prompts)},
                "return_logprob": kind is KINDS[0],
            }
            for kind in KINDS
        ),
        # Plain SGLang counts otherwise beside the prefills of others.
        {
            **{"text": prompts[:1], "sampling_params": [PENALISED]},
            "return_logprob": True,
        },
    ]


def answers(server, body):
    return [each["output_ids"] for each in server.post("/generate", body)]


@pytest.fixture(scope="module")
def wanted(bodies, tmp_path_factory):
    """Return the answers of plain SGLang."""
    folder = tmp_path_factory.mktemp("plain")
    server = LiveServer(folder, "--disable-vericache", *BOTH).wait()
    try:
        return [answers(server, body) for body in bodies]
    finally:
        server.close()


def spoil(folder, fault):
    """Damage or delete the residual KV of every stored segment, the larger object."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    largest = max(file.stat().st_size for file in files)
    for file in files:
        if file.stat().st_size < 0.9 * largest:
            continue
        if fault == "missing":
            file.unlink()
        else:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)


def extended(*values):
    return pytest.param(*values, marks=pytest.mark.extended)


def answers_of_early_starts(bodies, folder, *flags, fault="", environment=()):
    """Have a server store documents, and answer about them from the store.

    Returns:
        The answers before and after; the counters before and after.
    """
    store = folder / "store"
    extra = {"directory": str(store), "read_mb_per_s": 8, "latency_ms": 1}
    where = ("--hicache-storage-backend-extra-config", json.dumps(extra))
    flags = (*FLAGS, *BOTH, *where, *flags)
    server = LiveServer(folder, *flags, environment=dict(environment)).wait()
    try:
        # The documents are prefilled, compressed and stored by the first requests.
        first, found = answers(server, bodies[0]), []
        server.settle("cache_store_waiting")
        if fault:
            spoil(store, fault)
        before = server.counters()
        for body in bodies:
            server.flush()
            found.append(answers(server, body))
        return first, found, before, server.settle()
    finally:
        server.close()


def completed_and_lost(before, counters):
    """Return how many early starts got their residual KV, and how many did not.

    On a slow machine some residual KV is late without a fault, and given up.
    """
    lost = counters["reprefills"] - before["reprefills"]
    assert counters["completions"] + lost == counters["early_starts"]
    return counters["completions"], lost


@pytest.mark.parametrize(
    ("fault", "flags"),
    [
        ("", ()),
        extended("missing", PAGES),
        extended("", ("--vericache-inner", "ngram", "--disable-overlap-schedule")),
        extended("damaged", ("--vericache-compressor", PLANES)),
        extended("", ("--vericache-compressor", f"keynorm+{PLANES}", *PAGES)),
    ],
)
def test_answers_are_those_of_plain_sglang(fault, flags, bodies, wanted, tmp_path):
    first, found, before, counters = answers_of_early_starts(
        bodies, tmp_path, *flags, fault=fault
    )
    assert first == wanted[0]
    assert found == wanted
    assert before["early_starts"] == 0
    assert counters["early_starts"] >= len(KINDS) - 1, "before residual KV was read"
    completed, lost = completed_and_lost(before, counters)
    assert (lost if fault else completed) > 0
    grown = {name: counters[name] - before[name] for name in ("drafted", "accepted")}
    assert fault or grown["accepted"] > grown["drafted"] / 2, "over the stored draft KV"
    assert {name: counters[name] for name in HELD} == dict.fromkeys(HELD, 0)


@pytest.mark.extended
def test_a_retracted_request_is_answered_all_the_same(bodies, wanted, tmp_path):
    first, found, _, counters = answers_of_early_starts(
        bodies[:2], tmp_path, environment=RETRACTED
    )
    assert first == wanted[0]
    assert found == wanted[:2]
    assert counters["early_starts"] > 0
    assert {name: counters[name] for name in HELD} == dict.fromkeys(HELD, 0)


@pytest.mark.extended
def test_an_end_of_the_prompt_over_draft_kv_would_be_seen(bodies, wanted, tmp_path):
    """Were it not computed again over the full KV, answers would differ."""
    first, found, before, counters = answers_of_early_starts(
        bodies[:1], tmp_path, environment=faulty("approximate_end")
    )
    assert first == wanted[0]
    completed, _ = completed_and_lost(before, counters)
    assert completed > 0
    assert found != wanted[:1]
