"""A live server, its clients, and the same requests on plain SGLang."""

import http.client
import itertools
import json
import threading

import pytest
from openai import OpenAI

HELD = ("kept_slots", "staging_slots", "host_bytes", "running")

pytestmark = pytest.mark.server


def test_openai_client_gets_the_same_answer(servers, prompts):
    replies = []
    for server in servers:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        replies.append(
            client.chat.completions.create(
                model="default",
                messages=[
                    {
                        "role": "system",
                        "content": "user 1234|name=Maya Quin",
                    },
                    {"role": "user", "content": "verify user 1234"},
                ],
                temperature=0,
                max_tokens=64,
            )
        )
    ours, plain = replies
    assert ours.choices[0].message.content == plain.choices[0].message.content
    assert ours.choices[0].finish_reason == plain.choices[0].finish_reason
    assert ours.usage == plain.usage


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"more": {"return_logprob": True, "top_logprobs_num": 2}},
        {"n": 3},
        *(
            pytest.param(params, marks=pytest.mark.extended)
            for params in (
                {"stop": ['"', ","]},
                {"regex": r"\{\"name\":\"[a-z_]+\"\}"},
                {"frequency_penalty": 0.7, "presence_penalty": 0.3, "ignore_eos": True},
                {"repetition_penalty": 1.3, "ignore_eos": True},
                {"min_new_tokens": 30},
                {"logit_bias": {"20": -50.0, "30": 3.0}, "ignore_eos": True},
            )
        ),
    ],
    ids=lambda params: ",".join(params.get("more", params)) or "greedy",
)
def test_other_requests_in_the_batch_do_not_matter(servers, prompts, params):
    """A request of each kind among drafting requests answers as on plain SGLang."""
    ours, plain = servers
    background = threading.Thread(
        target=ours.generate, args=(prompts,), kwargs={"max_new_tokens": 120}
    )
    background.start()
    got = ours.generate(prompts[:3], **params)
    background.join()
    wanted = plain.generate(prompts[:3], **params)
    assert [g["output_ids"] for g in got] == [w["output_ids"] for w in wanted]
    for g, w in zip(got, wanted, strict=True):
        assert g["text"] == w["text"]
        assert g["meta_info"]["finish_reason"] == w["meta_info"]["finish_reason"]
        key = "output_token_logprobs"
        for mine, theirs in zip(
            g["meta_info"].get(key, ()), w["meta_info"].get(key, ()), strict=True
        ):
            assert mine[0] == pytest.approx(theirs[0], abs=1e-4)
            assert mine[1] == theirs[1]


def test_sampled_requests_are_answered_beside_drafting_ones(servers, prompts):
    ours, _ = servers
    answers = ours.generate(prompts, temperature=0.9, top_p=0.9, max_new_tokens=30)
    assert all(answer["output_ids"] for answer in answers)


def stream(server, body):
    """Yield the chunks of a streamed /generate."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request(
        "POST",
        "/generate",
        json.dumps({**body, "stream": True}),
        {"Content-Type": "application/json"},
    )
    reply = connection.getresponse()
    for line in reply:
        if line.startswith(b"data: {"):
            yield connection, json.loads(line[6:])


def test_a_stream_has_no_empty_chunk_and_adds_up(servers, prompts):
    ours, plain = servers
    body = {
        "text": prompts[3],
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": 240,
            "ignore_eos": True,
        },
    }
    lengths, last = [], None
    for _, chunk in stream(ours, body):
        lengths.append(chunk["meta_info"]["completion_tokens"])
        last = chunk
    assert lengths == sorted(set(lengths)), "a chunk without a new token"
    # SGLang joins chunks that wait for a slow client, so not every one is a cycle's;
    # the first is of the prompt's token and the last may be cut short.
    between = [b - a for a, b in itertools.pairwise(lengths[:-1])]
    assert min(between) <= 9, "no chunk of a single cycle"
    assert last["text"] == plain.post("/generate", body)["text"]


def test_disconnects_and_aborts_give_everything_back(servers, prompts):
    ours, plain = servers

    def hang_up(text, after):
        body = {
            "text": text,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": 400,
                "ignore_eos": True,
            },
        }
        for i, (connection, _) in enumerate(stream(ours, body)):
            if i == after:
                connection.sock.close()
                return

    threads = [
        threading.Thread(target=hang_up, args=(prompts[i % 6], i % 4))
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ours.post("/abort_request", {"rid": "", "abort_all": True})
    counters = ours.settle()
    assert {name: counters[name] for name in HELD} == dict.fromkeys(HELD, 0)
    got, wanted = (s.generate(prompts, max_new_tokens=24) for s in (ours, plain))
    assert [g["output_ids"] for g in got] == [w["output_ids"] for w in wanted]


def test_flush_leaves_a_working_server(servers, prompts):
    ours, plain = servers
    ours.settle()
    ours.flush()
    got, wanted = (s.generate(prompts[:2], max_new_tokens=24) for s in (ours, plain))
    assert [g["output_ids"] for g in got] == [w["output_ids"] for w in wanted]
    assert got[0]["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("tokens", "again_run"),
    [
        pytest.param(20, 0, id="short"),  # nothing is compressed for so few tokens
        pytest.param(60, 64, id="long"),  # SnapKV runs its window of 64 tokens again
    ],
)
def test_a_finished_prefix_is_reused(servers, prompts, tokens, again_run):
    """The second turn finds the first one's prompt and answer in the cache."""
    for server in servers:
        server.flush()
    cached = []
    for server in servers:
        first = server.generate(prompts[2], max_new_tokens=30, ignore_eos=True)
        again = prompts[2] + first["text"] + "<|end|>\n<|user|>"
        second = server.generate(again, max_new_tokens=tokens)
        cached.append((second["meta_info"]["cached_tokens"], second["output_ids"]))
    (ours, our_ids), (plain, plain_ids) = cached
    assert our_ids == plain_ids
    # Plain SGLang's overlapped last iteration leaves the KV of one token more.
    assert plain - 1 - again_run <= ours <= plain


def test_acceptance_is_reported_per_request(servers, prompts):
    ours, _ = servers
    info = ours.generate(prompts[3], max_new_tokens=48, ignore_eos=True)["meta_info"]
    assert info["spec_verify_ct"] >= 5
    histogram = info["spec_correct_drafts_histogram"]
    assert sum(histogram) == info["spec_verify_ct"]
    assert info["spec_num_correct_drafts"] == sum(
        i * count for i, count in enumerate(histogram)
    )
