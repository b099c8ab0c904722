"""Streams: no chunk without a token, no stop string, no long silence, true usage."""

import itertools
import json
import urllib.request

import pytest

pytestmark = pytest.mark.server

BURST = 8 + 1
"""Tokens of one verification: the draft length of these servers, and one more."""

TOKENS = 80


def events(server, path, body):
    """Return the events of a stream, parsed; it has to end with [DONE]."""
    request = urllib.request.Request(
        server.url + path,
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        lines = [line[6:].strip() for line in reply if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def body_of(prompt, **sampling):
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, **sampling}
    return {"text": prompt, "sampling_params": {"ignore_eos": True, **sampling}}


@pytest.fixture(scope="module")
def answer(servers, prompts):
    """Return what plain SGLang says to the prompt of these tests."""
    return servers[1].post("/generate", body_of(prompts[3]))


def stops_of(text):
    """Return stop strings that begin and end inside tokens of ``text``, late in it."""
    middle = len(text) // 2
    return [text[middle : middle + n] for n in (1, 5, 14)]


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("more", [{}, {"no_stop_trim": True}, {"stream_interval": 3}])
def test_a_stop_string_never_leaks(servers, prompts, answer, length, more):
    """What a client has seen at any time is a beginning of plain SGLang's answer."""
    ours, plain = servers
    decoy = answer["text"][-9:] + "never said"
    body = body_of(prompts[3], stop=[stops_of(answer["text"])[length], decoy], **more)
    whole = plain.post("/generate", body)
    assert whole["meta_info"]["finish_reason"]["type"] == "stop"
    chunks = events(ours, "/generate", body)
    assert all(whole["text"].startswith(chunk["text"]) for chunk in chunks)
    last = chunks[-1]
    assert last["text"] == whole["text"]
    assert last["output_ids"] == whole["output_ids"]
    for key in ("finish_reason", "prompt_tokens", "completion_tokens"):
        assert last["meta_info"][key] == whole["meta_info"][key]


@pytest.mark.parametrize("interval", [1, 3, 20])
def test_a_chunk_is_a_burst_or_an_interval(servers, prompts, answer, interval):
    """At most the tokens of an interval that had begun, and those of one cycle."""
    body = body_of(prompts[3], stream_interval=interval)
    chunks = events(servers[0], "/generate", body)
    assert chunks[-1]["text"] == answer["text"]
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    steps = [b - a for a, b in itertools.pairwise(counts)]
    assert min(steps) >= 1
    # SGLang hands a reader that was late several chunks as one.
    assert min(steps) <= interval - 1 + BURST
    assert sum(steps[:-1]) >= interval * (len(steps) - 1) / 2


@pytest.mark.parametrize("options", [{}, {"continuous_usage_stats": True}])
def test_usage_in_streams(servers, prompts, options):
    """Once at the end, or with every chunk; the totals are plain SGLang's."""
    body = {"model": "default", "prompt": prompts[3], "max_tokens": TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "n": 2}
    body["stream_options"] = {"include_usage": True, **options}
    told = []
    for server in servers:
        chunks = events(server, "/v1/completions", body)
        texts, usages = ["", ""], []
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
            if chunk.get("usage"):
                usages.append(chunk["usage"])
        totals = ("prompt_tokens", "completion_tokens", "total_tokens")
        told.append((texts, [usages[-1][key] for key in totals]))
        assert usages[-1]["completion_tokens"] == 2 * TOKENS
        assert (len(usages) > 1) == bool(options)
    assert told[0] == told[1]
