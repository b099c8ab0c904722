"""Prefixes shared by running requests, kept on the host, and found again in a store."""

import json
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_server import MODEL, LiveServer, flip_a_bit, fork

from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts
from vericache_sglang.kv.segment_length import SEGMENT

pytestmark = pytest.mark.server

KEPT = SEGMENT // 4
"""Tokens a head keeps of a segment: ``--vericache-keep`` is a quarter."""
FLAGS = (
    *("--vericache-min-prompt", "64", "--vericache-draft-length", "8"),
    *("--vericache-residency", "host", "--vericache-compressor", "keynorm"),
)
KVZAP = f"kvzap:weights={MODEL / 'kvzap-mlp'}"
LONG = {"max_new_tokens": 32, "ignore_eos": True}
LOST = "cache_store_failed_calls"
HELD = ("kept_slots", "staging_slots", "running", "cache_draft_slots_used")


@pytest.fixture(scope="module")
def documents():
    """Return documents of 1,100 to 2,700 tokens, each with a question behind it."""
    return record_prompts(load_tokenizer(MODEL), [2700, 1100, 1700, 2300], 5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return plain SGLang with room for everything."""
    folder = tmp_path_factory.mktemp("plain")
    server = LiveServer(folder, "--disable-vericache", "--max-total-tokens", "60000")
    try:
        yield server.wait()
    finally:
        server.close()


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """Return a server of ours with room for everything."""
    folder = tmp_path_factory.mktemp("roomy")
    server = LiveServer(folder, *FLAGS, "--max-total-tokens", "60000")
    try:
        yield server.wait()
    finally:
        server.close()


def ids(answers):
    return [answer["output_ids"] for answer in answers]


def cached(answer):
    return answer["meta_info"]["cached_tokens"]


def questions(document, count):
    """Ask about several users of a document."""
    head, tail = document.rsplit("<|user|>", 1)
    users = re.findall(r"user (\d+)\|", head)
    return [
        f"{head}<|user|>" + re.sub(r"\d+", users[i % len(users)], tail, count=1)
        for i in range(count)
    ]


def expect_nothing_held(server):
    counters = server.settle()
    assert {name: counters[name] for name in HELD} == dict.fromkeys(HELD, 0)
    return counters


def test_a_shared_document_has_one_draft_part_and_one_residual(roomy, plain, documents):
    prompts = questions(documents[0], 12)
    wanted = ids(plain.generate(prompts, **LONG))
    before = roomy.counters()
    first = roomy.generate(prompts[0], **LONG)
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda text: roomy.generate(text, **LONG), prompts))
    assert first["output_ids"] == wanted[0]
    assert ids(answers) == wanted
    assert min(map(cached, answers)) > 4 * SEGMENT
    assert all(answer["meta_info"]["vericache"]["cycles"] for answer in answers)
    counters = expect_nothing_held(roomy)
    assert counters["compressions"] - before["compressions"] == 13
    segments = 2700 // SEGMENT
    assert counters["cache_draft_slots"] == segments * KEPT
    token_bytes = counters["cache_host_bytes"] // (segments * (SEGMENT - KEPT))
    assert counters["cache_residual_bytes"] < segments * SEGMENT * token_bytes
    (tiers,) = roomy.get("/vericache/cache")
    assert tiers["device"]["draft_slots"] == segments * KEPT
    assert tiers["host"]["bytes"] == counters["cache_host_bytes"]
    assert tiers["store"]["hit_tokens"] == 0


@pytest.mark.extended
def test_questions_about_a_document_share_its_copy_on_the_host(
    tmp_path, plain, documents
):
    """Each has draft KV of its own; all read their residual KV from one copy."""
    prompts = questions(documents[0], 8)
    wanted = ids(plain.generate(prompts, **LONG))
    flags = (*FLAGS, "--vericache-compressor", "snapkv", "--max-total-tokens", "60000")
    server = LiveServer(tmp_path, *flags).wait()
    try:
        assert ids([server.generate(prompts[0], **LONG)]) == wanted[:1]
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda t: server.generate(t, **LONG), prompts))
        assert ids(answers) == wanted
        assert min(map(cached, answers)) > 4 * SEGMENT
        assert all(answer["meta_info"]["vericache"]["cycles"] for answer in answers)
        counters = expect_nothing_held(server)
        assert counters["compressions"] == 9
        assert counters["cache_host_tokens"] == 2700 // SEGMENT * SEGMENT
        assert counters["peak_running"] > 1
        # Four residual KVs of their own would be three documents.
        assert counters["peak_host_bytes"] < 1.5 * counters["cache_host_bytes"]
        assert counters["host_bytes"] == 0
        server.flush()
        assert server.counters()["host_used_bytes"] == 0
    finally:
        server.close()


def test_no_prefix_crosses_a_namespace(roomy, plain, documents):
    prompt = documents[1]
    (wanted,) = ids(plain.generate([prompt], **LONG))
    for more in ({}, {"extra_key": "a"}, {"cache_salt": "s"}):
        fresh = roomy.generate(prompt, **LONG, more=more)
        again = roomy.generate(prompt, **LONG, more=more)
        assert cached(fresh) < SEGMENT <= cached(again)
        assert fresh["output_ids"] == again["output_ids"] == wanted


@pytest.mark.extended
def test_a_chat_finds_what_it_said_before(roomy, plain, documents):
    """Turn by turn the same tokens, and at most a segment of prefill more."""
    tokenizer = load_tokenizer(MODEL)
    texts = [documents[2]] * 2
    for turn in range(5):
        pair = []
        for i, server in enumerate((roomy, plain)):
            answer = server.generate(texts[i], max_new_tokens=150, ignore_eos=True)
            pair.append(answer)
            text = tokenizer.decode(answer["output_ids"])
            texts[i] += f"{text}<|end|>\n<|user|>turn {turn}<|end|>\n<|assistant|>"
        ours, other = pair
        assert ours["output_ids"] == other["output_ids"]
        assert cached(ours) >= cached(other) - SEGMENT
    expect_nothing_held(roomy)


def test_a_flush_forgets_every_tier(roomy, documents):
    roomy.generate(documents[3], **LONG)
    roomy.settle()
    roomy.flush()
    counters = roomy.counters()
    for name in ("segments", "draft_slots", "host_bytes", "residual_bytes"):
        assert counters[f"cache_{name}"] == 0
    assert cached(roomy.generate(documents[3], **LONG)) < SEGMENT


@pytest.mark.parametrize(
    ("compressor", "store", "ranks"),
    [
        ("keynorm", True, 1),
        pytest.param("snapkv", False, 1, marks=pytest.mark.extended),
        pytest.param("keynorm", True, 2, marks=pytest.mark.extended),
    ],
)
def test_prefixes_come_back_from_a_host_that_is_too_small(
    tmp_path, plain, documents, compressor, store, ranks
):
    """The pool holds one document, the host two: all four are asked by turns.

    With a store what leaves the host is remembered there, and fetched.
    """
    folder = json.dumps({"directory": str(tmp_path / "store")})
    flags = ("--hicache-storage-backend", "file")
    flags += ("--hicache-storage-backend-extra-config", folder)
    server = LiveServer(
        tmp_path,
        *FLAGS,
        *("--vericache-compressor", compressor, "--max-total-tokens", "4000"),
        *("--vericache-host-gb", str(0.02 / ranks), "--tp-size", str(ranks)),
        *(flags if store else ()),
    )
    wanted = ids(plain.generate(documents, **LONG))
    try:
        server.wait()
        order = [0, 1, 2, 3, 3, 1, 1, 2, 0, 3, 2, 2]
        with ThreadPoolExecutor(2) as clients:
            answers = list(
                clients.map(lambda i: server.generate(documents[i], **LONG), order)
            )
        assert ids(answers) == [wanted[i] for i in order]
        # One after another: pool and host together hold three of four.
        server.settle("cache_store_waiting")
        again = [server.generate(text, **LONG) for text in documents]
        assert ids(again) == wanted
        counters = expect_nothing_held(server)
        assert counters["cache_match_host_tokens"] > 0
        assert counters["cache_evicted_host_tokens"] > 0
        assert counters["host_used_bytes"] <= counters["host_budget_bytes"]
        assert counters["cache_checksum_failures"] == 0
        assert (counters["cache_store_written_bytes"] > 0) is store
        assert (counters["cache_match_store_tokens"] > 0) is store
    finally:
        server.close()


@pytest.mark.parametrize(
    ("made", "served"),
    [
        ("split-planes", ["split-planes"]),
        pytest.param(KVZAP, [KVZAP], marks=pytest.mark.extended),
        pytest.param(
            "kvzip+kivi", ["kvzip+kivi", "keynorm+kivi"], marks=pytest.mark.extended
        ),
    ],
)
def test_prefixes_are_compressed_before_anybody_asks(
    tmp_path, plain, documents, made, served
):
    """A costly method runs in a process of its own; servers draft on its KV.

    Also one whose own method is cheap: what was made offline is taken before its own.
    All of them hold the key of the store, which is theirs alone.
    """
    asked = documents[:2]
    wanted = ids(plain.generate(asked, **LONG))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in asked))
    store = json.dumps({"directory": str(tmp_path / "store")})
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    engine = json.dumps({"max_total_tokens": 20000, "max_running_requests": 4})
    command = [sys.executable, "-m", "vericache_sglang.compress"]
    command += ["--model-path", str(MODEL)]
    command += ["--prompts", str(prompts), "--store-config", store, "--engine", engine]
    command += ["--store-key", str(key), "--compressor", made]
    log = tmp_path / "compress.log"
    child = fork(command, {}, log)
    assert child.wait(240) == 0, log.read_text()[-4000:]
    assert "2 of 2: " in log.read_text()
    files = [tmp_path / "store", *(tmp_path / "store").iterdir()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o700, 0o600}
    flags = (*FLAGS, "--max-total-tokens", "20000", "--hicache-storage-backend", "file")
    flags += ("--hicache-storage-backend-extra-config", store)
    flags += ("--vericache-store-key", str(key))
    for compressor in served:
        server = LiveServer(tmp_path, *flags, "--vericache-compressor", compressor)
        try:
            server.wait()
            answers = server.generate(asked, **LONG)
            counters = server.settle()
        finally:
            server.close()
        assert ids(answers) == wanted
        assert min(map(cached, answers)) >= SEGMENT
        assert all(answer["meta_info"]["vericache"]["cycles"] for answer in answers)
        whole = sum(cached(answer) // SEGMENT for answer in answers) * SEGMENT
        assert 0 < counters["cache_draft_slots"] < whole
        assert counters["cache_store_written_bytes"] == 0, "nothing was left to make"


@pytest.mark.extended
def test_two_ranks_find_prefixes_on_the_host_and_after_a_restart(
    tmp_path, plain, documents
):
    """The pool holds one of two documents; the other is on the host of both ranks."""
    asked = [documents[0], documents[2]]
    wanted = ids(plain.generate(asked, **LONG))
    store = json.dumps({"directory": str(tmp_path / "store")})
    flags = ("--tp-size", "2", "--max-total-tokens", "4000")
    flags += ("--hicache-storage-backend", "file")
    flags += ("--hicache-storage-backend-extra-config", store)
    for order in ([0, 1, 0], [1]):
        server = LiveServer(tmp_path, *FLAGS, *flags)
        try:
            server.wait()
            answers = [server.generate(asked[i], **LONG) for i in order]
            counters = expect_nothing_held(server)
            os.killpg(server.process.pid, signal.SIGTERM)
            server.process.wait(60)
        finally:
            server.close()
        assert ids(answers) == [wanted[i] for i in order]
        assert cached(answers[-1]) >= 3 * SEGMENT
        came = "store" if order == [1] else "host"
        assert counters[f"cache_match_{came}_tokens"] >= 3 * SEGMENT
        assert all(answer["meta_info"]["vericache"]["cycles"] for answer in answers)


@pytest.mark.extended
@pytest.mark.parametrize("compressor", ["split-planes", "keynorm+kivi"])
def test_a_server_that_starts_again_answers_from_the_store(
    tmp_path, plain, documents, compressor
):
    """Killed or drained, and whatever became of the files: the same tokens."""
    asked = documents[:3]
    wanted = ids(plain.generate(asked, **LONG))
    folder = tmp_path / "store"
    store = {"directory": str(folder)}
    flags = ("--hicache-storage-backend", "file", "--max-total-tokens", "20000")
    extra = ("--hicache-storage-backend-extra-config", json.dumps(store))
    extra += ("--vericache-compressor", compressor)

    def answers_of_a_new_server(end):
        server = LiveServer(tmp_path, *FLAGS, *flags, *extra)
        try:
            server.wait()
            answers = [server.generate(text, **LONG) for text in asked]
            counters = server.counters()
            # A drained server's own processes end in order, with all writes done.
            (os.kill if end == signal.SIGTERM else os.killpg)(server.process.pid, end)
            server.process.wait(60)
        finally:
            server.close()
        assert ids(answers) == wanted
        return answers, counters

    _, before = answers_of_a_new_server(signal.SIGTERM)
    answers, counters = answers_of_a_new_server(signal.SIGKILL)
    for answer in answers:
        length = answer["meta_info"]["prompt_tokens"]
        whole = cached(answer) >= (length - 1) // SEGMENT * SEGMENT
        # A disk that stalls for seconds may cost segments, which is counted.
        assert whole or before[LOST] or counters[LOST], (answer, before, counters)
    assert counters["cache_store_damaged"] == 0
    for file in folder.rglob("*.bin"):
        flip_a_bit(file)
    answers, counters = answers_of_a_new_server(signal.SIGKILL)
    assert max(map(cached, answers)) < SEGMENT
    assert counters["cache_store_damaged"] > 0
