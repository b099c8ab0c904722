"""The ``openai`` client on a server of ours and on plain SGLang: the same answers."""

import asyncio
import json

import openai
import pytest
from programs.drafting import draw_prompts, expect_drafting, messages

pytestmark = pytest.mark.server

LONG = {"temperature": 0, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
"""A greedy answer long enough to be drafted in several rounds."""


@pytest.fixture(scope="module")
def asked():
    """Return six demo prompts."""
    return draw_prompts(6)


@pytest.fixture(scope="module")
def clients(servers):
    """Return an ``openai.OpenAI`` for each of (ours, plain)."""
    made = [
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        for server in servers
    ]
    yield made
    for client in made:
        client.close()


def told(reply):
    """Return what a reply says: all of it but ids and the time."""
    said = reply.model_dump()
    for name in ("id", "created"):
        said.pop(name)
    for choice in said["choices"]:
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            call.pop("id")
    return said


def joined(stream):
    """Add the chunks of a chat stream up.

    Returns:
        (texts by choice, reasons by choice, usage or None).
    """
    texts, reasons, usage = {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (
                choice.delta.content or ""
            )
            if choice.finish_reason:
                assert choice.index not in reasons, "finished twice"
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


@pytest.fixture
def on_both(servers, clients):
    """Return a function that runs a job with both clients and compares the results."""

    def run(job):
        with expect_drafting(servers[0]):
            got = job(clients[0])
        assert got == job(clients[1])
        return got

    return run


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"stop": ['"city"', "}"]},
        {"n": 2},
        {"max_tokens": 9},
        {"max_completion_tokens": 21},
    ],
    ids=lambda params: ",".join(params) or "plain",
)
def test_chat_streamed_and_whole(on_both, asked, params):
    def job(client):
        ask = {"model": "default", "temperature": 0, "messages": messages(asked[0])}
        whole = client.chat.completions.create(**ask, **params)
        streamed = client.chat.completions.create(
            **ask, **params, stream=True, stream_options={"include_usage": True}
        )
        texts, reasons, usage = joined(streamed)
        assert texts == {c.index: c.message.content for c in whole.choices}
        assert reasons == {c.index: c.finish_reason for c in whole.choices}
        assert usage.completion_tokens == whole.usage.completion_tokens
        assert usage.total_tokens == whole.usage.total_tokens
        return told(whole), usage

    said, _ = on_both(job)
    if not params:
        assert said["choices"][0]["message"]["content"] == asked[0].answer


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"n": 2, "echo": True},
        {"stop": ["code"], "user": "someone"},
        {"frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"logit_bias": {"20": -20, "30": 2}},
    ],
    ids=lambda params: ",".join(params) or "plain",
)
def test_completions_streamed_and_whole(on_both, asked, params):
    """Two prompts in one call."""

    def job(client):
        ask = {"model": "default", **LONG}
        texts = [prompt.text for prompt in asked[:2]]
        whole = client.completions.create(prompt=texts, **{**ask, **params})
        streamed = {}
        for chunk in client.completions.create(
            prompt=texts, **{**ask, **params}, stream=True
        ):
            for choice in chunk.choices:
                streamed[choice.index] = streamed.get(choice.index, "") + choice.text
        assert streamed == {c.index: c.text for c in whole.choices}
        return told(whole)

    on_both(job)


def test_seeded_sampling_gives_plain_text(on_both, asked):
    """Both servers run deterministic inference: a seed fixes every draw.

    A document goes on with another record, so there is much to choose from.
    """

    def job(client):
        ask = {"model": "default", "prompt": asked[2].document, "max_tokens": 40}
        drawn = [
            client.completions.create(**ask, seed=seed, temperature=1.0, **params)
            for seed, params in (
                (7, {}),
                (7, {"top_p": 0.8}),
                (8, {"extra_body": {"top_k": 5, "ignore_eos": True}}),
                (8, {"presence_penalty": 0.4}),
            )
        ]
        chat = client.chat.completions.create(
            model="default", messages=messages(asked[2]), temperature=1.5, seed=3
        )
        return [told(reply) for reply in (*drawn, chat)]

    said = on_both(job)
    assert len({each["choices"][0]["text"] for each in said[:4]}) > 2


def test_logprobs(servers, clients, asked):
    def chat(client):
        reply = client.chat.completions.create(
            model="default",
            messages=messages(asked[3]),
            temperature=0,
            logprobs=True,
            top_logprobs=3,
        )
        return [
            (entry.token, entry.bytes, entry.logprob, top.token, top.logprob)
            for entry in reply.choices[0].logprobs.content
            for top in entry.top_logprobs
        ]

    def text(client):
        reply = client.completions.create(
            model="default", prompt=asked[3].text, **LONG, logprobs=2
        )
        found = reply.choices[0].logprobs
        assert len(found.tokens) == len(found.top_logprobs)
        return list(zip(found.tokens, found.token_logprobs, strict=True))

    for job in (chat, text):
        with expect_drafting(servers[0]):
            ours = job(clients[0])
        plain = job(clients[1])
        assert len(ours) == len(plain) >= 16
        for mine, theirs in zip(ours, plain, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                if isinstance(one, float):
                    assert one == pytest.approx(other, abs=1e-4)
                else:
                    assert one == other


def test_json_schema_of_a_response(on_both, asked):
    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["verify_user", "reset_code"]},
            "id": {"type": "string", "pattern": "^[0-9]{4}$"},
            "force": {"type": "boolean"},
        },
        "required": ["name", "id", "force"],
        "additionalProperties": False,
    }
    wrapped = {"name": "call", "schema": schema, "strict": True}

    def job(client):
        formats = (
            {"type": "json_schema", "json_schema": wrapped},
            {"type": "json_object"},
        )
        return [
            told(
                client.chat.completions.create(
                    model="default",
                    messages=messages(asked[4]),
                    temperature=0,
                    max_tokens=60,
                    response_format=response_format,
                )
            )
            for response_format in formats
        ]

    said, _ = on_both(job)
    answer = json.loads(said["choices"][0]["message"]["content"])
    assert set(answer) == set(schema["properties"])


def test_per_request_control(servers, clients, asked):
    """A request may turn drafting off for itself, or draft shorter."""
    ours, _ = servers

    def ask(client, **vericache):
        return client.chat.completions.create(
            model="default",
            messages=messages(asked[5]),
            temperature=0,
            max_tokens=60,
            extra_body={"custom_params": {"vericache": vericache}, "ignore_eos": True},
        )

    before = ours.counters()
    off = ask(clients[0], enabled=False)
    after = ours.counters()
    assert after["drafted"] == before["drafted"]
    with expect_drafting(ours):
        short = ask(clients[0], draft_length=2)
    done = ours.counters()
    assert done["drafted"] - after["drafted"] <= 2 * (done["cycles"] - after["cycles"])
    plain = told(ask(clients[1]))
    assert told(off) == told(short) == plain
    usage = ask(clients[0], report=True).usage
    assert usage.completion_tokens == plain["usage"]["completion_tokens"]
    assert usage.vericache["cycles"] > 0
    assert 0 <= usage.vericache["accepted"] <= usage.vericache["drafted"]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("enabled", {"enabled": "yes"}),
        ("draft_length", {"draft_length": 0}),
        ("draft_length", {"draft_length": 1.5}),
        ("drafts", {"drafts": 3}),
        ("vericache", 5),
    ],
)
def test_malformed_control_is_refused_by_name(clients, asked, field, given):
    with pytest.raises(openai.BadRequestError, match=field):
        clients[0].completions.create(
            model="default",
            prompt=asked[0].text,
            max_tokens=4,
            extra_body={"custom_params": {"vericache": given}},
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_p": 1.5},
        {"max_tokens": -3},
        {"max_tokens": 10**6},
        {"stop": 7},
        {"response_format": {"type": "json_schema"}},
        {"extra_body": {"min_tokens": 9, "max_tokens": 3}},
    ],
    ids=str,
)
def test_wrong_requests_get_the_same_refusal(clients, asked, wrong):
    refusals = []
    for client in clients:
        with pytest.raises(openai.APIStatusError) as refusal:
            client.chat.completions.create(
                model="default", messages=messages(asked[0]), **wrong
            )
        refusals.append((refusal.value.status_code, refusal.value.message))
    assert refusals[0] == refusals[1]


@pytest.mark.parametrize("wrong", [{"n": 0}, {"logit_bias": {"99999": 1}}], ids=str)
def test_a_refusal_names_the_field_where_sglang_does_not(clients, asked, wrong):
    refusals = []
    for client in clients:
        with pytest.raises(openai.BadRequestError) as refusal:
            client.chat.completions.create(
                model="default", messages=messages(asked[0]), **wrong
            )
        refusals.append(refusal.value.message)
    (field,) = wrong
    assert f"{field} must" in refusals[0]
    assert refusals[0] != refusals[1]


def test_sixteen_streams_at_once(servers, asked):
    """An async client reads sixteen streams; half of them hang up early."""

    async def read(client, prompt, until):
        stream = await client.chat.completions.create(
            model="default", messages=messages(prompt), **LONG, stream=True
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            if len(text) >= until:
                await stream.close()
                break
        return text[:until]

    async def all_of(server):
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(
                *(read(client, asked[i % 6], 30 if i % 2 else 999) for i in range(16))
            )

    ours, plain = servers
    with expect_drafting(ours):
        got = asyncio.run(all_of(ours))
    assert got == asyncio.run(all_of(plain))
    held = ours.settle()
    assert (held["kept_slots"], held["staging_slots"], held["host_bytes"]) == (0, 0, 0)


def test_a_cancelled_stream_leaves_nothing_behind(servers, clients, asked):
    ours, _ = servers
    stream = clients[0].completions.create(
        model="default",
        prompt=asked[0].text,
        temperature=0,
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for count, _ in enumerate(stream):
        if count == 3:
            break
    stream.close()
    before = ours.settle()
    assert before["host_bytes"] == before["kept_slots"] == 0
    again = [
        client.chat.completions.create(
            model="default", messages=messages(asked[0]), temperature=0
        )
        for client in clients
    ]
    assert again[0].choices[0].message.content == asked[0].answer
    assert told(again[0])["choices"] == told(again[1])["choices"]
