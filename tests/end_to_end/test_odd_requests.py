"""Odd requests of all kinds against a live server, with healthy ones behind each."""

import json
import threading
import urllib.error

import pytest
from live_server import MODEL, LiveServer

from vericache_sglang.evaluation.odd_requests import ODD, STRANGE
from vericache_sglang.evaluation.workload import load_tokenizer, record_prompts

pytestmark = pytest.mark.server

HEALTHY = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return a server of its own: an odd request may end it."""
    folder = tmp_path_factory.mktemp("odd")
    flags = (
        *("--max-total-tokens", "30000", "--enable-metrics"),
        *("--enable-custom-logit-processor", "--vericache-min-prompt", "64"),
        *("--vericache-draft-length", "8", "--vericache-residency", "host"),
    )
    live = LiveServer(folder, *flags)
    try:
        yield live.wait()
    finally:
        live.close()


@pytest.fixture(scope="module")
def prompt():
    return record_prompts(load_tokenizer(MODEL), [300], 5)[0]


@pytest.fixture(scope="module")
def wanted(servers, prompt):
    """Return plain SGLang's answer to the healthy request."""
    return servers[1].generate(prompt, **HEALTHY)["text"]


def ask(server, path, body):
    """Return (status, text) of a reply."""
    try:
        return 200, json.dumps(server.post(path, body))
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
def test_an_odd_request_is_refused_by_name(server, prompt, wanted, odd):
    ids = load_tokenizer(MODEL).encode(prompt)
    for path, body in odd.bodies(prompt, ids):
        status, text = ask(server, path, body)
        assert status == 400, (path, status, text[:300])
        named = odd.name if path == "/generate" else odd.name.removesuffix("_num")
        assert named in text, (path, text[:300])
    assert server.generate(prompt, **HEALTHY)["text"] == wanted


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_request_is_answered_and_harms_nobody(server, prompt, wanted, name):
    for params, fields in STRANGE[name]:
        params = {"temperature": 0, "max_new_tokens": 8, **params}
        body = {"text": prompt, **fields, "sampling_params": params}
        status, text = ask(server, "/generate", body)
        assert status in (200, 400), (fields, status, text[:300])
    assert server.generate(prompt, **HEALTHY)["text"] == wanted


def test_128_answers_to_one_prompt(server, prompt, wanted):
    answers = server.generate(prompt, **HEALTHY, n=128)
    assert [answer["text"] for answer in answers] == [wanted] * 128


def test_ending_one_request_ends_no_other(server, prompt, wanted):
    """SGLang ends all whose id begins with that of the one to end."""
    server.settle()  # the last ones are counted for an iteration longer
    answers, tokens = {}, {"a": 5000, "ab": 200, "b": 200}

    def run(rid):
        asked = {"max_new_tokens": tokens[rid], "ignore_eos": True}
        answers[rid] = server.generate(prompt, **asked, more={"rid": rid})

    threads = [threading.Thread(target=run, args=(rid,)) for rid in tokens]
    for thread in threads:
        thread.start()
    while server.counters()["running"] < 3:
        assert any(thread.is_alive() for thread in threads)
    server.post("/abort_request", {"rid": "a"})
    for thread in threads:
        thread.join()
    ends = {rid: a["meta_info"]["finish_reason"]["type"] for rid, a in answers.items()}
    assert ends == {"a": "abort", "ab": "length", "b": "length"}
    assert answers["ab"]["text"].startswith(wanted)
    assert answers["ab"]["text"] == answers["b"]["text"]


def asked(server, prompt, answers):
    """Start a long healthy request; return its thread once it drafts."""
    rounds = server.counters()["cycles"]
    more = {"max_new_tokens": 200, "ignore_eos": True}
    thread = threading.Thread(
        target=lambda: answers.append(server.generate(prompt, **more))
    )
    thread.start()
    while server.counters()["cycles"] < rounds + 2:
        assert thread.is_alive()
    return thread


def test_a_flush_under_load_is_refused_and_harms_nobody(server, prompt, wanted):
    answers = []
    thread = asked(server, prompt, answers)
    status, _ = ask(server, "/flush_cache", {})
    assert status == 400
    thread.join()
    assert answers[0]["text"].startswith(wanted)
    assert len(answers[0]["output_ids"]) == 200


def test_profiling_under_load_harms_nobody(server, prompt, wanted, tmp_path):
    answers = []
    thread = asked(server, prompt, answers)
    body = {"output_dir": str(tmp_path), "activities": ["CPU"], "num_steps": 3}
    assert b"Start profiling" in server.fetch("/start_profile", body)
    thread.join()
    # It has ended by itself after so many steps.
    with pytest.raises(urllib.error.HTTPError, match="500"):
        server.fetch("/stop_profile", {})
    assert answers[0]["text"].startswith(wanted)
    assert server.generate(prompt, **HEALTHY)["text"] == wanted


def test_nothing_is_held_in_the_end(server):
    counters = server.settle()
    held = ("kept_slots", "staging_slots", "staging_bytes", "host_bytes", "running")
    assert {name: counters[name] for name in held} == dict.fromkeys(held, 0)
    assert server.process.poll() is None
