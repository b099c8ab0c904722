"""Sessions, parallel answers, scores, embeddings, health, beside drafting requests."""

import json
import threading
import urllib.error
import urllib.request

import pytest

pytestmark = pytest.mark.server


def call(server, path, body=None):
    """Return (status, answer) of a request, whatever the status."""
    request = urllib.request.Request(
        server.url + path,
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            status, text = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()


@pytest.fixture
def busy(servers, prompts):
    """Keep our server drafting during a test; the answers are checked after it."""
    ours, plain = servers
    answers = []
    asked = {"max_new_tokens": 150, "ignore_eos": True}
    background = threading.Thread(
        target=lambda: answers.extend(ours.generate(prompts, **asked))
    )
    background.start()
    yield
    background.join()
    wanted = plain.generate(prompts, **asked)
    assert [a["output_ids"] for a in answers] == [w["output_ids"] for w in wanted]


OTHERS = {
    "/health": None,
    "/health_generate": None,
    "/ping": None,
    "/model_info": None,
    "/v1/tokenize": {"prompt": "user 1234"},
    "/v1/embeddings": {"model": "default", "input": "user 1234"},
    "/encode": {"text": "user 1234"},
    "/classify": {"text": "user 1234", "model": "default"},
    "/v1/rerank": {"query": "user", "documents": ["user 1234"]},
    "/no_such_path": None,
}
"""Paths and bodies; a generation server refuses those that need an embedding model."""


@pytest.mark.usefixtures("busy")
def test_other_endpoints_answer_as_on_plain_sglang(servers):
    got, wanted = (
        {path: call(server, path, body) for path, body in OTHERS.items()}
        for server in servers
    )
    assert got == wanted
    assert [status for status, _ in got.values()] == [200] * 5 + [400] * 4 + [404]


def test_models_are_listed(servers):
    got, wanted = (call(server, "/v1/models")[1]["data"] for server in servers)
    assert [m["id"] for m in got] == [m["id"] for m in wanted]
    assert [m["max_model_len"] for m in got] == [m["max_model_len"] for m in wanted]


def test_scores_are_plain_ones(servers, prompts):
    body = {"model": "default", "query": prompts[0], "items": ['{"', "user"]}
    body |= {"label_token_ids": [5, 9, 20, 30], "apply_softmax": True}
    got, wanted = (call(server, "/v1/score", body)[1] for server in servers)
    for g, w in zip(got["scores"], wanted["scores"], strict=True):
        assert g == pytest.approx(w, abs=1e-5)


def test_parallel_answers_share_their_prompt(servers, prompts):
    """The prompt is prefilled once, and every copy drafts on its own."""
    n = 3
    answers = [
        server.generate(prompts[1:3], n=n, max_new_tokens=60, ignore_eos=True)
        for server in servers
    ]
    got, wanted = ([a["output_ids"] for a in some] for some in answers)
    assert got == wanted
    assert len(got) == 2 * n


@pytest.mark.extended
@pytest.mark.usefixtures("busy")
def test_a_session_goes_on_branches_and_ends(servers, prompts):
    """A session keeps its row between turns, so its requests are decoded plainly."""
    told = []
    for server in servers:
        _, session = call(server, "/open_session", {"capacity_of_str_len": 20000})
        turns, rid = [], None

        def turn(text, session=session, server=server, **where):
            body = {"text": text, "session_params": {"id": session, **where}}
            body["sampling_params"] = {"temperature": 0.0, "max_new_tokens": 40}
            return call(server, "/generate", body)

        for text in (prompts[0], "<|end|>\n<|user|>verify user 1234", "<|end|>\n"):
            _, answer = turn(text, rid=rid)
            rid = answer["meta_info"]["id"]
            turns.append((answer["output_ids"], answer["meta_info"]["prompt_tokens"]))
        _, answer = turn("user", rid=rid, offset=-10, replace=True)
        turns.append((answer["output_ids"], answer["meta_info"]["prompt_tokens"]))
        call(server, "/close_session", {"session_id": session})
        status, refusal = turn("user", rid=rid)
        turns.append((status, json.dumps(refusal).replace(session, "ID")))
        told.append(turns)
    assert told[0] == told[1]
    assert told[0][-1][0] == 400
