"""Programs in SGLang's frontend language, on a server of ours and on plain SGLang."""

import json
import re

import pytest

pytest.importorskip("sglang")

import sglang as sgl
from programs.drafting import draw_prompts, expect_drafting
from sglang.lang.chat_template import ChatTemplate, register_chat_template

pytestmark = [pytest.mark.server, pytest.mark.extended]

GREEDY = {"temperature": 0.0, "use_thread": False}

register_chat_template(
    ChatTemplate(
        name="demo-model",
        default_system_prompt=None,
        role_prefix_and_suffix={
            "system": ("<s><|system|>", "<|end|>\n"),
            "user": ("<|user|>", "<|end|>\n"),
            "assistant": ("<|assistant|>", "<|end|>\n"),
        },
        stop_str=("<|end|>",),
    )
)


@pytest.fixture(scope="module")
def asked():
    """Return four demo prompts."""
    return draw_prompts(4)


@pytest.fixture(scope="module")
def backends(servers):
    """Return the frontend's (ours, plain)."""
    return [
        sgl.RuntimeEndpoint(server.url, chat_template_name="demo-model")
        for server in servers
    ]


@pytest.fixture
def on_both(servers, backends):
    """Return a function that runs a job on both backends and compares what it returns.

    The job takes a backend; ours must have drafted for it.
    """

    def run(job):
        with expect_drafting(servers[0]):
            got = job(backends[0])
        assert got == job(backends[1])
        return got

    return run


@sgl.function
def conversation(s, prompt, again):
    s += sgl.system(prompt.document)
    s += sgl.user(prompt.question)
    s += sgl.assistant(sgl.gen("first", max_tokens=80))
    s += sgl.user(again)
    s += sgl.assistant(sgl.gen("second", max_tokens=80))


@sgl.function
def continued(s, text, **params):
    s += text
    s += sgl.gen("out", **params)


def test_a_conversation_of_two_turns(on_both, asked):
    prompt = asked[0]
    again = f"verify user {prompt.records[-1].id}"

    def job(backend):
        state = conversation.run(prompt, again, backend=backend, **GREEDY)
        return state["first"], state["second"], state.text(), state.messages()

    first, second, _, turns = on_both(job)
    assert first == prompt.answer
    assert prompt.records[-1].code in second
    assert [turn["role"] for turn in turns] == [
        *("system", "user", "assistant", "user", "assistant")
    ]


def test_generation_stops_at_a_string_and_at_a_pattern(on_both, asked):
    def job(backend):
        found = []
        for params in (
            {"stop": ['"arguments"', "}"]},
            {"stop_regex": r'"city":"[A-Z]'},
            {"stop": ['"city"', '"name":"'], "stop_regex": r"[0-9]{4}"},
            {"max_tokens": 17},
            {"min_tokens": 60, "max_tokens": 64},
        ):
            state = continued.run(
                asked[1].text, **{"max_tokens": 70, **params}, backend=backend, **GREEDY
            )
            info = state.get_meta_info("out")
            found.append(
                (state["out"], info["finish_reason"], info["completion_tokens"])
            )
        return found

    found = on_both(job)
    assert found[0][0] + '"arguments"' in asked[1].answer
    assert len({text for text, *_ in found}) == len(found)


def test_select_finds_the_most_likely_choice(on_both, asked):
    """``select`` reads log-probabilities of the prompt; what follows is drafted."""
    tools = ["verify_user", "send_invoice", "reset_code", "ship_device", "open_ticket"]

    @sgl.function
    def choose(s, prompt):
        s += prompt.text + '{"name":"'
        s += sgl.select("tool", [*tools, "book_visit"])
        s += '","arguments":{"id":"'
        s += sgl.gen("id", max_tokens=30, ignore_eos=True)

    def job(backend):
        states = [choose.run(prompt, backend=backend, **GREEDY) for prompt in asked[:2]]
        return [(state["tool"], state["id"]) for state in states]

    for prompt, (tool, rest) in zip(asked[:2], on_both(job), strict=True):
        wanted = json.loads(prompt.answer)
        assert tool == wanted["name"]
        assert rest.startswith(wanted["arguments"]["id"])


def test_select_scores_equal_plain_ones(backends, asked):
    @sgl.function
    def choose(s, text):
        s += text + '{"name":"'
        s += sgl.select("tool", ["verify_user", "send_invoice", "reset_code"])

    scores = []
    for backend in backends:
        state = choose.run(asked[0].text, backend=backend, **GREEDY)
        scores.append(state.get_meta_info("tool")["normalized_prompt_logprobs"])
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_forks_share_the_prefix_and_are_joined(on_both, asked):
    document = asked[0]

    @sgl.function
    def ask_each(s, ids):
        s += sgl.system(document.document)
        forks = s.fork(len(ids))
        for fork, user_id in zip(forks, ids, strict=True):
            fork += sgl.user(f"verify user {user_id}")
            fork += sgl.assistant(sgl.gen("call", max_tokens=60))
        forks.join()
        s += sgl.user("\n".join(s["call"][0:2]))
        s += sgl.assistant(sgl.gen("summary", max_tokens=40, ignore_eos=True))

    ids = [record.id for record in document.records[:5]]

    def job(backend):
        state = ask_each.run(ids, temperature=0.0, backend=backend)
        return list(state["call"]), state["summary"]

    calls, _ = on_both(job)
    assert [json.loads(call)["arguments"]["id"] for call in calls] == ids


def test_grammars_of_gen(on_both, asked):
    """Regex, JSON schema and typed values: SGLang's grammars mask every token."""
    call = r'\{"name":"[a-z_]+","arguments":\{"id":"[0-9]{4}"\}\}'
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Bob"]}, "force": {"type": "boolean"}},
        "required": ["name", "force"],
    }

    @sgl.function
    def shaped(s, text):
        s += text
        s += sgl.gen("free", max_tokens=40, ignore_eos=True)
        s += "\n" + sgl.gen("call", max_tokens=60, regex=call)
        s += "\n" + sgl.gen("object", max_tokens=60, json_schema=json.dumps(schema))
        s += "\n" + sgl.gen("count", max_tokens=6, dtype=int)

    def job(backend):
        found = []
        for prompt in asked[:2]:
            state = shaped.run(prompt.text, backend=backend, **GREEDY)
            found.append([state[k] for k in ("free", "call", "object", "count")])
        return found

    for _, called, made, count in on_both(job):
        assert re.fullmatch(call, called)
        assert json.loads(made)["name"] in ("Ada", "Bob")
        int(count)


def test_a_batch_of_programs(on_both, asked):
    arguments = [{"text": prompt.text, "max_tokens": 60} for prompt in asked] * 2

    def job(backend):
        states = continued.run_batch(
            arguments, temperature=0.0, backend=backend, num_threads=8
        )
        return [state["out"] for state in states]

    got = on_both(job)
    assert got == [prompt.answer for prompt in asked] * 2


def test_a_streamed_program(on_both, asked):
    """The chunks add up to the text, and none is empty."""

    def job(backend):
        state = continued.run(
            asked[2].text, max_tokens=60, temperature=0.0, stream=True, backend=backend
        )
        chunks = list(state.text_iter("out"))
        assert all(chunks)
        return "".join(chunks), state["out"], state.text()

    streamed, whole, _ = on_both(job)
    assert streamed == whole == asked[2].answer
