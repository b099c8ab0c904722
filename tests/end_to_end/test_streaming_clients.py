"""Raw event streams, tool calls, reasoning and the other protocols SGLang speaks.

The streams are read as LangChain's and Anthropic's clients read them: lines cut at any
byte, tool calls put together from deltas by their index.
"""

import json

import httpx
import pytest
from programs.drafting import draw_prompts, expect_drafting, messages

from vericache_sglang.demo_records import FUNCTIONS

pytestmark = [pytest.mark.server, pytest.mark.extended]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "id": {"type": "string", "pattern": "^[0-9]{4}$"},
                    **{field: {"type": "string"} for field in function.fields},
                    **{
                        key: {"const": value}
                        for key, value in json.loads(
                            f"{{{function.constants}}}"
                        ).items()
                    },
                },
                "required": ["id"],
                "additionalProperties": False,
            },
        },
    }
    for name, function in FUNCTIONS.items()
]


@pytest.fixture(scope="module")
def asked():
    """Return three demo prompts."""
    return draw_prompts(3, seed=9)


def events(server, path, body):
    """Yield (event name, data) of a server-sent event stream, read in pieces."""
    with httpx.stream("POST", server.url + path, json=body, timeout=120) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        rest, name = b"", None
        for piece in reply.iter_bytes(chunk_size=31):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"event: "):
                    name = line[7:].decode()
                elif line.startswith(b"data: "):
                    yield name, line[6:].decode()
                else:
                    assert not line.strip(), f"not an event: {line}"
        assert not rest.strip(), f"cut off in {rest}"


def chat_deltas(server, body):
    """Put a chat stream together as LangChain does.

    Returns:
        The message (content, reasoning, tool calls by index), its finish reason and
        the usage of the last chunk.
    """
    message = {"content": "", "reasoning_content": "", "tool_calls": {}}
    reason, usage, done = None, None, False
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for _, data in events(server, "/v1/chat/completions", body):
        assert not done, f"data after [DONE]: {data}"
        if data == "[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                held = message["tool_calls"].setdefault(
                    call["index"], {"id": None, "name": "", "arguments": ""}
                )
                held["id"] = call.get("id") or held["id"]
                held["name"] += call["function"].get("name") or ""
                held["arguments"] += call["function"].get("arguments") or ""
    assert done
    return message, reason, usage


def said(message):
    """Return a whole message in the form of ``chat_deltas``."""
    return {
        "content": message.get("content") or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "tool_calls": {
            i: {"id": call["id"], **call["function"]}
            for i, call in enumerate(message.get("tool_calls") or ())
        },
    }


def without_ids(message):
    """Drop the tool calls' random ids."""
    calls = [{**call, "id": None} for call in message["tool_calls"].values()]
    return {**message, "tool_calls": calls}


def ask(prompt, **more):
    """Return the body of a greedy chat."""
    return {
        **{"model": "default", "temperature": 0, "max_tokens": 80},
        **{"messages": messages(prompt), **more},
    }


def streamed_and_whole(server, body):
    """Answer ``body`` streamed and whole, require the same, and return it."""
    message, reason, usage = chat_deltas(server, body)
    whole = server.post("/v1/chat/completions", body)
    (choice,) = whole["choices"]
    assert without_ids(message) == without_ids(said(choice["message"]))
    assert reason == choice["finish_reason"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage.get("reasoning_tokens") == whole["usage"].get("reasoning_tokens")
    for call in message["tool_calls"].values():
        assert call["id"]
    return without_ids(message), reason, usage


def test_tool_calls_are_drafted_and_parsed(servers, asked):
    """The model's answer is a call, which SGLang's parser takes apart."""
    ours, plain = servers
    for prompt in asked[:2]:
        body = ask(prompt, tools=TOOLS)
        with expect_drafting(ours):
            got = streamed_and_whole(ours, body)
        assert got == streamed_and_whole(plain, body)
        message, reason, _ = got
        wanted = json.loads(prompt.answer)
        (call,) = message["tool_calls"]
        assert call["name"] == wanted["name"]
        assert json.loads(call["arguments"]) == wanted["arguments"]
        assert (reason, message["content"]) == ("tool_calls", "")


def test_tool_calls_turned_off(servers, asked):
    body = ask(asked[0], tools=TOOLS, tool_choice="none")
    got, wanted = (streamed_and_whole(server, body) for server in servers)
    assert got == wanted
    assert got[0]["content"] == asked[0].answer


@pytest.mark.parametrize("name", [None, "reset_code"])
def test_tool_choice_is_held_by_a_grammar(servers, asked, name):
    """Asked whole: how SGLang's parser reads a stream depends on where it is cut.

    The demo model does not fill a schema well, and the parser gives what is left of a
    broken call as content or not, by the chunks it comes in.
    """
    named = {"type": "function", "function": {"name": name}}
    body = ask(asked[0], tools=TOOLS, tool_choice=named if name else "required")
    with expect_drafting(servers[0]):
        got = servers[0].post("/v1/chat/completions", body)
    wanted = servers[1].post("/v1/chat/completions", body)
    (mine,), (theirs,) = got["choices"], wanted["choices"]
    assert without_ids(said(mine["message"])) == without_ids(said(theirs["message"]))
    assert mine["finish_reason"] == theirs["finish_reason"] == "tool_calls"
    assert got["usage"] == wanted["usage"]


@pytest.mark.parametrize(
    ("thinking", "params"),
    [
        (True, {}),
        (True, {"max_tokens": 23}),
        (True, {"stop": ['","']}),
        (False, {"regex": r"<think>[a-z ]{8,20}</think>[a-z]{3,9} [0-9]{4}"}),
    ],
    ids=["to the end", "cut", "stopped", "with an answer"],
)
def test_reasoning_is_split_from_the_answer(servers, asked, thinking, params):
    """SGLang's reasoning parser sees drafted bursts as it sees single tokens.

    The demo model never ends its reasoning unless a pattern makes it.
    """
    ours, plain = servers
    body = ask(
        asked[1],
        chat_template_kwargs={"thinking": thinking},
        ignore_eos=thinking,
        **{"max_tokens": 60, **params},
    )
    with expect_drafting(ours):
        got = streamed_and_whole(ours, body)
    assert got == streamed_and_whole(plain, body)
    message, _, usage = got
    assert message["reasoning_content"]
    assert bool(message["content"]) == (not thinking)
    if thinking:
        assert usage["reasoning_tokens"] == usage["completion_tokens"]


def test_anthropic_messages(servers, asked):
    prompt = asked[2]
    body = {
        **{"model": "default", "max_tokens": 80, "temperature": 0},
        "system": prompt.document,
        "messages": [{"role": "user", "content": prompt.question}],
    }

    def job(server):
        text, kinds, stop, usage = "", [], None, {}
        for name, data in events(server, "/v1/messages", {**body, "stream": True}):
            event = json.loads(data)
            assert event["type"] == name
            kinds.append(name)
            if name == "content_block_delta":
                text += event["delta"]["text"]
            elif name == "message_delta":
                stop, usage = event["delta"]["stop_reason"], event["usage"]
        whole = server.post("/v1/messages", body)
        assert whole["content"] == [{"type": "text", "text": text}]
        assert whole["stop_reason"] == stop
        assert whole["usage"]["output_tokens"] == usage["output_tokens"]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        count = {name: body[name] for name in ("model", "system", "messages")}
        counted = server.post("/v1/messages/count_tokens", count)
        return text, stop, whole["usage"], counted

    ours, plain = servers
    with expect_drafting(ours):
        got = job(ours)
    assert got == job(plain)
    assert got[0] == prompt.answer


def other_protocols(prompt, model):
    """Return (path, body, function that finds the text of the answer) by name."""
    greedy = {"temperature": 0, "max_new_tokens": 80}
    return {
        "responses": (
            "/v1/responses",
            {
                **{"model": model, "temperature": 0, "max_output_tokens": 80},
                **{"instructions": prompt.document, "input": prompt.question},
                "store": False,
            },
            lambda reply: reply["output"][-1]["content"][0]["text"],
        ),
        "ollama": (
            "/api/generate",
            {
                **{"model": "default", "prompt": prompt.text, "stream": False},
                "options": {"temperature": 0, "num_predict": 80},
                "raw": True,
            },
            lambda reply: reply["response"],
        ),
        "vertex": (
            "/vertex_generate",
            {
                "instances": [{"text": prompt.text}],
                "parameters": {"sampling_params": greedy},
            },
            lambda reply: reply["predictions"][0]["text"],
        ),
        "sagemaker": (
            "/invocations",
            ask(prompt),
            lambda reply: reply["choices"][0]["message"]["content"],
        ),
    }


@pytest.mark.parametrize("name", ["responses", "ollama", "vertex", "sagemaker"])
def test_other_protocols(servers, asked, name):
    ours, plain = servers
    model = plain.get("/v1/models")["data"][0]["id"]
    path, body, text = other_protocols(asked[0], model)[name]
    with expect_drafting(ours):
        got = ours.post(path, body)
    wanted = plain.post(path, body)
    assert text(got) == text(wanted) == asked[0].answer
    assert set(got) == set(wanted)
