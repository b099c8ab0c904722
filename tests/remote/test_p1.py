"""A drafter drafts on stored draft KV, a verifier verifies: plain SGLang's answers.

The drafter's link to the store is EMULATED: reads from a folder are delayed. The tests
share servers and run in order: the last ones kill them.
"""

from pathlib import Path

import pytest
from live_pair import LOGPROBS, MOVED, OF_OUTPUT, Streams, begin, kill
from live_server import MODEL, flip_a_bit
from stored_pair import FILTERED, RETRACTED, SEEDED, TOKENS, servers, settled

from vericache_sglang.evaluation.server import free_port
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

pytestmark = pytest.mark.server
KIVI = ("--vericache-compressor", "kivi:bits=4")
PLANES = (
    "--vericache-compressor",
    "keynorm+split-planes:exponent_bits=3,mantissa_bits=1",
)
STATELESS = ("--vericache-guest-kv", "stateless")
REGEX = {"regex": "[a-z0-9 ]{150}", "ignore_eos": True}
LOOKUP = ("--vericache-inner", "ngram")
extended = pytest.mark.extended


PENALISED = {"ignore_eos": True, "presence_penalty": 0.4, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def shared(tmp_path_factory, plain, documents):
    """Return the servers of most tests."""
    with servers(tmp_path_factory.mktemp("p1"), plain, documents) as found:
        yield found


@pytest.fixture
def pair(shared):
    """Return the servers; a drafter that has prefilled a prompt reads no draft KV."""
    shared.drafter.flush()
    return shared


KINDS = {
    "greedy": {"ignore_eos": True},
    "seeded and filtered": FILTERED,
    # Ends after 219 tokens; 49 can be over before draft KV is there.
    "grammar": {"regex": "[a-z0-9 ]{400}"},
    "grammar, end token ignored": {"regex": "[a-z0-9 ]{400}", "ignore_eos": True},
    "log-probabilities": {"ignore_eos": True, **LOGPROBS},
    "stop strings": {"stop": ["0", " the"]},
    "biased": {"logit_bias": {"20": 5.0}},
}
SHORT = {"stop strings", "biased"}
"""Kinds whose answers may end before draft KV is there."""


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(KINDS, id="at once"),
        # Plain SGLang counts otherwise beside the prefills of others.
        pytest.param({"penalties": PENALISED}, id="penalties", marks=extended),
    ],
)
def test_answers_of_every_kind_are_those_of_plain_sglang(pair, documents, kinds):
    texts = documents[2:3] if len(kinds) > 1 else documents
    before = pair.drafter.counters()
    answers = pair.compare_kinds(kinds, texts, max_new_tokens=TOKENS)
    after = settled(pair.drafter)
    assert pair.until(pair.verifier, lambda c: c["remote_guests"] == 0)
    told = {
        kind: [one for one in map(told_of, found) if one["path"] == "p1"]
        for kind, found in answers.items()
    }
    for kind in kinds.keys() - SHORT:
        drafted = sum(one["drafted"] for one in told[kind])
        assert drafted, (kind, pair.events())
        # Half of the drafts under a grammar are rejected: a few may all be.
        few = "regex" in kinds[kind] and drafted < 16
        assert few or any(one["accepted"] for one in told[kind]), kind
    moved = [one["drafted"] for found in told.values() for one in found]
    assert after["remote_p1"] - before["remote_p1"] == len(moved)
    assert after["drafted"] - before["drafted"] == sum(moved)


def told_of(answer):
    return answer["meta_info"]["vericache"]


@extended
@pytest.mark.parametrize(
    ("spoil", "seed", "damaged"), [(Path.unlink, 6, 0), (flip_a_bit, 7, 2)]
)
def test_without_stored_draft_kv_requests_are_relayed(pair, spoil, seed, damaged):
    texts = record_prompts(load_tokenizer(MODEL), [1500, 2100], seed)
    stored = pair.folder / "store"
    known = {*stored.iterdir()}
    pair.keep(texts)
    for each in {*stored.iterdir()} - known:
        spoil(each)
    before = pair.drafter.counters()
    answers = pair.compare(texts, max_new_tokens=TOKENS, ignore_eos=True)
    paths = {told_of(each)["path"] for each in answers}
    assert paths == {"b1"}, pair.events()
    after = settled(pair.drafter)
    assert after["cache_store_damaged"] - before["cache_store_damaged"] == damaged
    assert after["cache_store_misses"] > before["cache_store_misses"]
    assert after["remote_p1"] == before["remote_p1"]


def test_an_aborted_request_ends_on_both_sides(pair, documents):
    before = pair.drafter.counters()
    client = begin(pair.drafter, documents[0], 5000)
    pair.until(pair.drafter, lambda c: c["drafted"] > before["drafted"])
    client.close()
    pair.until(pair.verifier, lambda c: c["remote_guests"] == c["running"] == 0)
    settled(pair.drafter)


@extended
def test_lost_repeated_and_reordered_messages_change_no_answer(pair, documents):
    pair.proxy.share = 0.05
    passed = pair.proxy.altered
    try:
        pair.compare(documents, max_new_tokens=TOKENS, ignore_eos=True)
    finally:
        pair.proxy.share = 0.0
    assert pair.proxy.altered > passed + 5
    pair.connected()


def test_a_verifier_that_is_killed_costs_no_client_anything(pair, documents):
    texts = [*documents, *documents]
    params = [MOVED[i % len(MOVED)] for i in range(len(texts))]
    expected = Streams(pair.plain, texts, TOKENS, params).texts()
    before = pair.drafter.counters()
    streams = Streams(pair.drafter, texts, TOKENS, params)
    pair.until(pair.drafter, lambda c: c["drafted"] > before["drafted"])
    kill(pair.verifier)
    assert streams.texts() == expected
    assert all(len(chunks) > 4 for chunks in streams.chunks)
    lasts = [chunks[-1]["meta_info"] for chunks in streams.chunks]
    assert "local" in {last["vericache"]["path"] for last in lasts}
    settled(pair.drafter)
    pair.restart_verifier()


@extended
def test_a_drafter_that_is_killed_leaves_no_guest(pair, documents):
    before = pair.drafter.counters()
    clients = [begin(pair.drafter, text, 5000) for text in documents]
    wanted = before["remote_p1"] + len(documents)
    pair.until(pair.drafter, lambda c: c["remote_p1"] == wanted)
    kill(pair.drafter)
    for client in clients:
        client.close()
    pair.until(pair.verifier, lambda c: c["remote_guests"] == c["running"] == 0)
    pair.verifier.flush()  # with strict checks: not a slot is missing
    answers = pair.verifier.generate(documents)
    plain = pair.plain.generate(documents)
    assert [a["output_ids"] for a in answers] == [p["output_ids"] for p in plain]


@extended
def test_drafting_goes_on_at_another_verifier(plain, documents, tmp_path):
    """Penalties count what the first verifier has decided."""
    port, asked = free_port(), (documents[:1], 450, [PENALISED])
    with servers(tmp_path, plain, documents, other=port) as pair:
        expected = Streams(pair.plain, *asked).texts()
        assert Streams(pair.plain, *asked[:2]).texts() != expected
        other = pair.start_verifier(port)
        try:
            other.wait()
            pair.until(pair.drafter, lambda c: c["remote_verifiers"] == 2)
            streams = Streams(pair.drafter, *asked)
            pair.until(pair.drafter, lambda c: c["drafted"] > 0)
            both = pair.verifier, other
            kill(max(both, key=lambda each: each.counters()["remote_guests"]))
            assert streams.texts() == expected
            lasts = [chunks[-1]["meta_info"]["vericache"] for chunks in streams.chunks]
            assert {last["path"] for last in lasts} == {"p1"}
            assert pair.drafter.counters()["remote_failovers"] > 0
            settled(pair.drafter)
        finally:
            other.close()


@extended
@pytest.mark.parametrize(
    ("path", "flags", "environment"),
    [
        ("p1", (*LOOKUP, "--page-size", "16", *KIVI), RETRACTED),
        ("p2", (*LOOKUP, "--page-size", "16", "--disable-overlap-schedule"), {}),
        ("p2", (*STATELESS, *PLANES), RETRACTED),
    ],
    ids=[
        "p1, codes, pages, prompt lookup, retracted",
        "p2, pages, no overlap, prompt lookup",
        "p2, codes, stateless, retracted",
    ],
)
def test_other_servers_answer_the_same(
    path, flags, environment, plain, documents, tmp_path
):
    own = {"path": path, "environment": environment}
    tokens, kinds = TOKENS, [{"ignore_eos": True, **OF_OUTPUT}, REGEX, SEEDED]
    if not set(flags).isdisjoint((*KIVI, *PLANES)):
        # Torch decodes a prompt's codes anew in every draft.
        tokens, kinds = TOKENS // 3, kinds[:2]
    with servers(tmp_path, plain, documents, *flags, **own) as pair:
        counters = pair.drafter.counters()
        for params in kinds:
            before = counters
            pair.drafter.flush()
            pair.compare(documents, max_new_tokens=tokens, **params)
            counters = settled(pair.drafter)
            drafted, accepted = (
                counters[name] - before[name] for name in ("drafted", "accepted")
            )
            # Under a grammar nearly all may be rejected.
            assert params is REGEX or accepted > drafted / 3
        assert counters[f"remote_{path}"] > 0
        assert (counters["inner_proposed_draft"] > 0) == ("ngram" in flags)
        pair.until(pair.verifier, lambda c: c["remote_guests"] == c["running"] == 0)
        waits = pair.verifier.settle()["remote_stateless"]
        assert (waits > 0) == (STATELESS[0] in flags), pair.events()
        prepared = pair.verifier.counters()["remote_prepared"]
        assert (prepared > 0) == (waits > 0), "their drafts are announced"


@extended
def test_guests_take_turns_in_memory_that_is_too_small_for_all(
    plain, documents, tmp_path
):
    small, large = (("--max-total-tokens", each) for each in ("6000", "30000"))
    with servers(tmp_path, plain, documents, *small, of_drafter=large) as pair:
        pair.compare(documents, max_new_tokens=TOKENS, **SEEDED)
        assert settled(pair.drafter)["remote_p1"] > 0
        assert pair.verifier.settle()["remote_stateless"] > 0, pair.events()
