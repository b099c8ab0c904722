"""As on P1 until residual KV has followed; then the drafter verifies: plain's answers.

The drafter's link to the store is EMULATED: reads from a folder are delayed. The tests
share servers and run in order: the last one kills the verifier.
"""

import pytest
from live_pair import LOGPROBS, MOVED, Streams, kill
from live_server import MODEL, faulty, flip_a_bit
from stored_pair import FILTERED, SEEDED, TOKENS, servers, settled

from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

pytestmark = pytest.mark.server
extended = pytest.mark.extended


@pytest.fixture(scope="module")
def shared(tmp_path_factory, plain, documents):
    """Return the servers of most tests."""
    with servers(tmp_path_factory.mktemp("p2"), plain, documents, path="p2") as found:
        yield found


@pytest.fixture
def pair(shared):
    """Return the servers; nothing is cached at the drafter."""
    shared.drafter.flush()
    return shared


def paths_of(answers):
    return [each["meta_info"]["vericache"]["path"] for each in answers]


KINDS = {
    "greedy": {"ignore_eos": True},
    "seeded and filtered": FILTERED,
    "log-probabilities": {"ignore_eos": True, **LOGPROBS},
    "grammar": {"regex": "[a-z0-9 ]{700}"},
}


def test_requests_leave_their_verifier_with_their_residual_kv(pair, documents):
    # Each has its own: one whose prefix another has brought here is decoded here.
    asked = (KINDS, {k: [text] for k, text in zip(KINDS, documents, strict=True)})
    before = pair.drafter.counters()
    answers = pair.compare_kinds(*asked, max_new_tokens=TOKENS)
    after = settled(pair.drafter)
    left = {kind: paths_of(found).count("p2") for kind, found in answers.items()}
    assert all(left.values()), pair.events()
    assert after["remote_p2"] - before["remote_p2"] == sum(left.values())
    assert after["remote_p1"] - before["remote_p1"] >= sum(left.values())
    assert pair.until(pair.verifier, lambda c: c["remote_guests"] == 0)
    # What they have brought here stays, and is used here.
    answers = pair.compare_kinds(*asked, max_new_tokens=TOKENS)
    for kind, found in answers.items():
        assert paths_of(found).count("local") >= left[kind]


def test_a_part_of_a_prefix_that_is_cached_here_is_no_obstacle(pair, documents):
    text = documents[0]
    # Decoded here, as its log-probabilities are of the prompt.
    first = pair.drafter.generate(
        [text[: len(text) // 2]], more={"return_logprob": True, "logprob_start_len": 0}
    )
    assert paths_of(first) == ["local"]
    assert pair.drafter.settle()["cache_device_tokens"] > 0
    (answer,) = pair.compare([text], max_new_tokens=TOKENS, ignore_eos=True)
    assert paths_of([answer]) == ["p2"], pair.events()
    again = pair.compare([text], max_new_tokens=TOKENS, ignore_eos=True)
    assert paths_of(again) == ["local"]
    assert again[0]["meta_info"]["cached_tokens"] >= 2 * 1024
    settled(pair.drafter)


@extended
@pytest.mark.parametrize(("fault", "seed"), [("missing", 6), ("damaged", 7)])
def test_without_residual_kv_requests_stay_at_their_verifier(pair, fault, seed):
    texts = record_prompts(load_tokenizer(MODEL), [1700, 2300], seed)
    stored = pair.folder / "store"
    known = {*stored.iterdir()}
    pair.keep(texts)
    added = {each: each.stat().st_size for each in {*stored.iterdir()} - known}
    for each, size in added.items():
        if size > 0.9 * max(added.values()):  # residual KV
            each.unlink() if fault == "missing" else flip_a_bit(each)
    before = pair.drafter.counters()
    answers = pair.compare(texts, max_new_tokens=TOKENS, ignore_eos=True)
    after = settled(pair.drafter)
    assert after["remote_p2"] == before["remote_p2"]
    assert "p1" in paths_of(answers), pair.events()
    assert "local" not in paths_of(answers), pair.events()


@extended
def test_without_its_verifier_a_request_awaits_its_residual_kv(pair, documents):
    texts = [*documents, *documents]
    params = [MOVED[i % len(MOVED)] for i in range(len(texts))]
    expected = Streams(pair.plain, texts, TOKENS, params).texts()
    before = pair.drafter.counters()
    streams = Streams(pair.drafter, texts, TOKENS, params)
    pair.until(pair.drafter, lambda c: c["remote_p1"] > before["remote_p1"])
    kill(pair.verifier)
    assert streams.texts() == expected
    assert settled(pair.drafter)["remote_p2"] > before["remote_p2"]
    pair.restart_verifier()


@extended
def test_paths_are_chosen_by_what_they_cost(plain, documents, tmp_path):
    with servers(tmp_path, plain, documents, path="auto") as pair:
        texts = [*documents, *documents]
        before = settled(pair.drafter)
        paths = paths_of(pair.compare(texts, max_new_tokens=TOKENS, **SEEDED))
        assert {*paths} <= {"b1", "p1", "p2", "local"}, pair.events()
        after = settled(pair.drafter)
        read_whole = after["remote_local"] - before["remote_local"]
        assert paths.count("local") == read_whole, "none is lost by its verifier"
        assert after["remote_returns"] == 0
        assert after["remote_p1"] > 0, "not measured before, so tried"
        shares = [after[f"remote_share_{path}"] for path in ("b1", "p1", "local")]
        assert sum(shares) == pytest.approx(1)
        pair.until(pair.verifier, lambda c: c["remote_guests"] == c["running"] == 0)


@extended
def test_full_kv_is_read_where_a_verifier_would_begin_later(plain, documents, tmp_path):
    own = {"path": "auto", "environment": faulty("whole_paths")}
    with servers(tmp_path, plain, documents, **own) as pair:
        first = pair.compare(documents[:1], max_new_tokens=TOKENS, **SEEDED)
        assert paths_of(first) != ["local"], "before the link was measured"
        before = settled(pair.drafter)
        answers = pair.compare(documents[1:], max_new_tokens=TOKENS, **SEEDED)
        assert {*paths_of(answers)} == {"local"}, pair.events()
        for text, answer in zip(documents[1:], answers, strict=True):
            prompt = answer["meta_info"]["prompt_tokens"]
            assert answer["meta_info"]["cached_tokens"] > 0.8 * prompt, text[:20]
        after = settled(pair.drafter)
        assert after["remote_local"] - before["remote_local"] == len(answers)
        assert after["remote_b1"] == before["remote_b1"]


@extended
def test_a_request_that_is_better_off_at_its_verifier_returns(
    plain, documents, tmp_path
):
    own = {"path": "auto", "environment": faulty("impatient_paths")}
    with servers(tmp_path, plain, documents, **own) as pair:
        pair.compare(documents, max_new_tokens=TOKENS, **SEEDED)
        counters = settled(pair.drafter)
        assert counters["remote_p1"] > 0
        assert counters["remote_p2"] == counters["remote_failovers"] == 0
        # Each was verified twice at most: the first verdict, and one on its way.
        assert counters["cycles"] <= 2 * counters["remote_p1"]
        pair.until(pair.verifier, lambda c: c["remote_guests"] == c["running"] == 0)


@extended
def test_tokens_over_draft_kv_that_are_not_computed_again_would_be_seen(
    plain, documents, tmp_path
):
    own = {"path": "p2", "environment": faulty("approximate_end")}
    with servers(tmp_path, plain, documents, **own) as pair:
        told = pair.drafter.generate(documents, max_new_tokens=TOKENS, ignore_eos=True)
        wanted = pair.plain.generate(documents, max_new_tokens=TOKENS, ignore_eos=True)
        assert "p2" in paths_of(told), pair.events()
        tokens = [each["output_ids"] for each in wanted]
        assert [each["output_ids"] for each in told] != tokens
