"""What a request may ask of VeriCache, and what it is told, over HTTP."""

import http.client
import json
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from live_server import LiveServer

pytestmark = pytest.mark.server


def ask(server, text, wishes=None, **params):
    """Answer one request of 48 tokens; ``wishes`` go to ``custom_params``."""
    if wishes is not None:
        params["custom_params"] = {"vericache": wishes}
    params = {"max_new_tokens": 48, "ignore_eos": True, **params}
    return server.generate(text, **params)


def check(figures):
    """Assert that one request's figures agree with each other."""
    histogram = figures["accepted_histogram"]
    assert sum(histogram) == figures["cycles"]
    assert sum(n * times for n, times in enumerate(histogram)) == figures["accepted"]
    assert figures["accepted"] <= figures["drafted"]
    assert figures["drafted"] <= figures["cycles"] * figures["draft_length"]
    assert len(histogram) <= figures["draft_length"] + 1


def test_a_drafted_request_says_so(servers, prompts):
    ours, plain = servers
    answer = ask(ours, prompts[3])
    info = answer["meta_info"]
    figures = info["vericache"]
    check(figures)
    assert figures["enabled"]
    assert figures["draft_length"] == 8
    # SGLang counts tokens decoded plainly as verifications without drafts.
    assert 5 <= figures["cycles"] <= info["spec_verify_ct"]
    assert figures["accepted"] == info["spec_num_correct_drafts"]
    assert figures["kv_moves"]["compress"] == 1
    wanted = ask(plain, prompts[3])
    assert answer["output_ids"] == wanted["output_ids"]
    assert "vericache" not in wanted["meta_info"]


def test_a_request_can_turn_drafting_off(servers, prompts):
    ours, _ = servers
    on, off = (ask(ours, prompts[3], {"enabled": enabled}) for enabled in (True, False))
    assert on["meta_info"]["vericache"]["cycles"] > 0
    figures = off["meta_info"]["vericache"]
    check(figures)
    assert not figures["enabled"]
    assert (figures["cycles"], figures["kv_moves"]) == (0, {})
    assert off["output_ids"] == on["output_ids"]


@pytest.mark.parametrize("length", [1, 4])
def test_a_request_can_ask_for_shorter_drafts(servers, prompts, length):
    ours, _ = servers
    answer = ask(ours, prompts[3], {"draft_length": length})
    figures = answer["meta_info"]["vericache"]
    check(figures)
    assert figures["draft_length"] == length
    assert figures["cycles"] >= 48 // (length + 1) - 1
    assert answer["output_ids"] == ask(ours, prompts[3])["output_ids"]


def test_requests_of_one_batch_keep_their_own_wishes(servers, prompts):
    """Drafted as each asks, in one batch, with the tokens of plain SGLang."""
    ours, plain = servers
    wishes = [{"draft_length": 2}, {"enabled": False}, {}, {"draft_length": 8}]
    params = [
        {
            "temperature": 0.0,
            "max_new_tokens": 40,
            "ignore_eos": True,
            "custom_params": {"vericache": each},
        }
        for each in wishes
    ]
    body = {"text": prompts[:4], "sampling_params": params}
    got, wanted = (server.post("/generate", body) for server in (ours, plain))
    assert [g["output_ids"] for g in got] == [w["output_ids"] for w in wanted]
    figures = [g["meta_info"]["vericache"] for g in got]
    for each in figures:
        check(each)
    assert [each["draft_length"] for each in figures] == [2, 8, 8, 8]
    assert [each["cycles"] > 0 for each in figures] == [True, False, True, True]


def test_a_short_prompt_is_not_drafted_for(servers):
    ours, _ = servers
    figures = ask(ours, "verify user 1234")["meta_info"]["vericache"]
    assert not figures["enabled"]
    assert figures["cycles"] == 0


def test_two_answers_to_one_prompt_have_figures_each(servers, prompts):
    ours, _ = servers
    answers = ask(ours, prompts[1], n=2)
    assert len(answers) == 2
    for answer in answers:
        check(answer["meta_info"]["vericache"])
        assert answer["meta_info"]["vericache"]["cycles"] > 0


def chunks(server, path, body):
    """Return the parsed chunks of a streamed reply."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request(
        "POST",
        path,
        json.dumps({**body, "stream": True}),
        {"Content-Type": "application/json"},
    )
    reply = connection.getresponse()
    return [json.loads(line[6:]) for line in reply if line.startswith(b"data: {")]


def test_a_stream_ends_with_the_figures_of_the_whole_answer(servers, prompts):
    ours, _ = servers
    sampling = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}
    body = {"text": prompts[3], "sampling_params": sampling}
    whole = ours.post("/generate", body)
    parts = chunks(ours, "/generate", body)
    assert parts[-1]["text"] == whole["text"]
    seen = [part["meta_info"]["vericache"] for part in parts]
    for figures in seen:
        check(figures)
    accepted = [figures["accepted"] for figures in seen]
    assert accepted == sorted(accepted), "totals only grow"
    last = seen[-1]
    assert last["cycles"] >= 5
    assert last["accepted"] == parts[-1]["meta_info"]["spec_num_correct_drafts"]


MALFORMED = [
    ({"draft": 3}, "draft"),
    ({"enabled": "yes"}, "enabled"),
    ({"draft_length": 0}, "draft_length"),
    ({"draft_length": 9}, "draft_length"),
    ("off", "custom_params.vericache"),
]


def refusal(server, path, body):
    """Return the status and the text of a reply that is an error."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post(path, body)
    return caught.value.code, caught.value.read().decode()


@pytest.mark.parametrize(("wishes", "name"), MALFORMED, ids=str)
def test_a_malformed_wish_is_refused_by_name(servers, prompts, wishes, name):
    ours, _ = servers
    custom = {"vericache": wishes}
    native = {"text": prompts[0], "sampling_params": {"custom_params": custom}}
    chat = {
        "model": "default",
        "messages": [{"role": "user", "content": "verify user 1234"}],
        "custom_params": custom,
    }
    for path, body in (("/generate", native), ("/v1/chat/completions", chat)):
        status, text = refusal(ours, path, body)
        assert (path, status) == (path, 400)
        assert name in text
        assert "vericache" in text


def test_a_server_goes_on_after_a_refusal(servers, prompts):
    ours, plain = servers
    refusal(
        ours,
        "/generate",
        {"text": prompts[:2], "sampling_params": {"custom_params": {"vericache": 1}}},
    )
    got, wanted = (s.generate(prompts[:2], max_new_tokens=16) for s in (ours, plain))
    assert [g["output_ids"] for g in got] == [w["output_ids"] for w in wanted]


def test_chat_requests_carry_wishes_too(servers, prompts):
    """A chat answer without drafts is the answer with them."""
    ours, _ = servers
    texts = []
    for wishes in ({"enabled": False}, {"draft_length": 2}):
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": prompts[1]}],
            "temperature": 0,
            "max_tokens": 24,
            "custom_params": {"vericache": wishes},
        }
        before = ours.settle()["cycles"]
        reply = ours.post("/v1/chat/completions", body)
        texts.append(reply["choices"][0]["message"]["content"])
        drafted = ours.settle()["cycles"] > before
        assert drafted is ("enabled" not in wishes)
    assert texts[0] == texts[1]


@pytest.mark.extended
def test_several_http_processes_serve_and_refuse_as_one_does(
    tmp_path, servers, prompts
):
    """SGLang starts them without plugins."""
    _, plain = servers
    flags = ("--enable-deterministic-inference", "--vericache-min-prompt", "64")
    several = LiveServer(tmp_path, *flags, "--tokenizer-worker-num", "2")
    bad = {"text": "x", "sampling_params": {"custom_params": {"vericache": 7}}}
    try:
        several.wait()
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(partial(ask, several), [*prompts, *prompts]))
            refused = list(
                clients.map(lambda _: refusal(several, "/generate", bad)[0], range(8))
            )
    finally:
        several.close()
    wanted = [answer["output_ids"] for answer in ask(plain, prompts)]
    assert [answer["output_ids"] for answer in answers] == [*wanted, *wanted]
    assert all("vericache" in answer["meta_info"] for answer in answers)
    assert refused == 8 * [400]
