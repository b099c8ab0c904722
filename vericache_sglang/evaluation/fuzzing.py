"""Malformed and extreme requests, drawn by schemathesis from SGLang's own OpenAPI.

Most are valid requests with one to three fields replaced by values that the schema
allows, values that it forbids, or values with a meaning outside the schema; some follow
or violate the schema of another route. The same seed gives the same bodies, whatever
modules are loaded.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp

from vericache_sglang.errors import ConfigError
from vericache_sglang.evaluation.left_out import left_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GENERATE, CHAT, COMPLETION = "/generate", "/v1/chat/completions", "/v1/completions"

OTHERS = (
    *("/v1/embeddings", "/encode", "/classify", "/v1/tokenize", "/v1/detokenize"),
    *("/v1/score", "/v1/rerank", "/v1/responses", "/v1/messages", "/api/generate"),
    *("/v1/messages/count_tokens", "/api/chat", "/parse_function_call"),
    *("/separate_reasoning", "/open_session", "/close_session", "/abort_request"),
)
"""Other routes that any client may ask; those that change the server are left out."""

FIELDS = (
    *("text", "input_ids", "input_embeds", "rid", "return_logprob", "stream"),
    *("logprob_start_len", "top_logprobs_num", "token_ids_logprob", "extra_key"),
    *("return_text_in_logprobs", "return_hidden_states", "return_sampling_mask"),
    *("return_entropy", "return_bytes", "session_params", "lora_path", "priority"),
    *("custom_logit_processor", "data_parallel_rank", "max_thinking_tokens"),
    *("require_reasoning", "cache_salt", "session_id", "received_time"),
)
"""Fields of ``/generate`` that are replaced, beside those of ``sampling_params``."""

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids"),
    *("stop_regex", "regex", "ebnf", "logit_bias", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "ignore_eos", "skip_special_tokens"),
    *("no_stop_trim", "custom_params"),
)
"""Fields of ``sampling_params``: the document types them only where chats have them."""

RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""The same under another name."""

NEVER = ("image_data", "audio_data", "video_data", "bootstrap_host", "encoder_urls")

SPECIAL: Mapping[str, tuple[Any, ...]] = {
    "text": ("", "x" * 40000, "\x00", "<|im_end|>" * 40),
    "prompt": ("", "x" * 40000, ["a", "b"], [[20] * 80] * 2),
    "messages": (
        *([{"role": "x", "content": "a"}], [{"role": "user", "content": None}]),
        [{"role": "assistant", "content": "a"}] * 50,
        [{"role": "user", "content": "x" * 40000}],
    ),
    "input_ids": ([0], [20] * 80, [20] * 2047, [20] * 2048, [[20] * 80, [30] * 90]),
    "rid": ("a" * 5000, "é\n\r", "same", ["same"], "HEALTH_CHECK_1"),
    "top_logprobs_num": (1, 5, 585, 586),
    "token_ids_logprob": ([], [20, 30], [20] * 1000),
    "return_hidden_states": (True, "last", "all"),
    "session_params": ({"id": "nothing"}, {"id": None, "rid": "same"}),
    "custom_logit_processor": ("garbage", "{}", '{"callable": "80"}'),
    "max_new_tokens": (0, -1, 3000, 10**9),
    "temperature": (1e-9, 1e30, 2),
    "n": (0, -1, 2, 5),
    "stop": ("", [""], ["a"] * 33, ["\x00"], ["e", ""], "x" * 2000),
    "stop_token_ids": ([-1], [586], [20, 20], [6]),
    "stop_regex": ("(", "(a+)+$", ".*", "[0-9]{3}", "a{1000000}"),
    "regex": ("(", "[", ".*", "[0-9]{4}", "a{0}", "(a|b){1,200}", "\\p{L}+", "$^"),
    "json_schema": ("", "{", "{}", "true", '{"type": "nothing"}', '{"$ref": "#"}'),
    "ebnf": ("root ::=", 'root ::= "a"', "root ::= root", 'x ::= "y"', "::"),
    "structural_tag": ("{}", "[", '{"structures": [], "triggers": []}'),
    "logit_bias": ({"586": 1}, {"-1": 1}, {"a": 1}, {"20": -100}),
    "response_format": (
        *({"type": "json_object"}, {"type": "nothing"}, {"type": "json_schema"}),
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": []}}},
    ),
    "tools": (
        [{"type": "function", "function": {"name": "f", "parameters": {}}}] * 40,
    ),
    "custom_params": (
        *({"vericache": each} for each in (None, 1, "off", {"keep": 1}, {}, True)),
        *({"vericache": {"enabled": each}} for each in (False, 0, "no", None)),
        *({"vericache": {"draft_length": n}} for n in (0, -1, 1, 10**9, 1.5, "8")),
        {"__req__": 1},
    ),
}
"""Values whose meaning is in their text or size."""

NO_NUMBERS = (math.nan, math.inf, -math.inf)
"""What JSON does not have and Python's parser takes."""

CUT = ("half", "hang_up", "hang_up_late")
"""Ways of sending a body after which nothing waits for the answer: closed within the
body, before and after the first bytes of the answer."""

DAMAGE = (b"", b"null", b"[" * 100_000, b'{"text":' * 5_000 + b"1" + b"}" * 5_000)


@dataclass(frozen=True)
class Body:
    """One request.

    Attributes:
        path: Route.
        data: The bytes sent as its body.
        sending: ``whole``, or one of ``CUT``.
        greedy: Its answer, if it has one, is a function of the request.
    """

    path: str
    data: bytes
    sending: str = "whole"
    greedy: bool = True

    @property
    def aborts_all(self) -> bool:
        """Whether it may end every request that runs."""
        return self.path == "/abort_request" and b"abort_all" in self.data


@dataclass(frozen=True)
class Reply:
    """A server's reply.

    Attributes:
        status: HTTP status; 0 where the connection ended without one.
    """

    status: int
    data: bytes

    def answers(self) -> list[tuple[str, str]] | None:
        """Return (text, finish reason) of each choice; None where it has none."""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            content = json.loads(self.data)
            if isinstance(content, dict) and "choices" in content:
                return [_choice(each) for each in content["choices"]]
            outputs = content if isinstance(content, list) else [content]
            return [
                (each["text"], str(each["meta_info"]["finish_reason"]))
                for each in outputs
            ]
        return None


def _choice(choice: dict[str, Any]) -> tuple[str, str]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return (text or "", str(choice["finish_reason"]))


def require_schemathesis() -> None:
    """Check that bodies can be drawn, before any server starts.

    Raises:
        ConfigError: schemathesis is missing.
    """
    try:
        import schemathesis  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "schemathesis draws the bodies and is missing: "
            "pip install 'vericache-sglang[test]'"
        ) from error


def draw(
    openapi: Mapping[str, Any],
    prompts: Sequence[str],
    count: int,
    seed: int,
    spared: Callable[[Mapping[str, Any]], bool] = left_out,
) -> list[Body]:
    """Draw bodies.

    Args:
        openapi: The server's document, ``GET /openapi.json``.
        prompts: Of right requests, which a server would draft for.
        count: How many bodies.
        spared: Predicate of contents not to send; by default those that crash SGLang.
    """
    rng = random.Random(seed)
    replaced = (GENERATE, CHAT, COMPLETION)
    known = [path for path in OTHERS if path in openapi["paths"]]
    # A drawn content takes 0.1 s: each is sent about five times, around other prompts.
    each = 10 + count // 20
    drawn = {p: _drawn(_schema(openapi, p, 1, 3), each, seed) for p in replaced}
    few = 2 + count // 200
    drawn |= {p: _drawn(_schema(openapi, p, 3, 9), few, seed) for p in known}
    weights = {GENERATE: 50.0, CHAT: 18.0, COMPLETION: 14.0}
    weights |= dict.fromkeys(known, 18.0 / len(known))
    bodies: list[Body] = []
    while len(bodies) < count:
        (path,) = rng.choices([*weights], weights=[*weights.values()])
        content = rng.choice(drawn[path])
        if path in replaced and isinstance(content, dict):
            content = _with(_right(rng, path, rng.choice(prompts)), content, rng)
        if not (isinstance(content, dict) and spared(content)):
            bodies.append(_body(rng, path, content))
    return bodies


def _fields(openapi: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the schemas of a route's fields; those that refer to others are left out.

    Drawing from those takes minutes.
    """
    body = openapi["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"].get("$ref", "").rpartition("/")[2]
    own = openapi["components"]["schemas"].get(name, {}).get("properties", {})
    return {
        name: schema
        for name, schema in own.items()
        if name not in NEVER and "$ref" not in json.dumps(schema)
    }


def _schema(openapi: Mapping[str, Any], path: str, least: int, most: int) -> Any:
    """Return a schema of ``least`` to ``most`` fields of a route, by dotted name."""
    fields = _fields(openapi, path)
    if path == GENERATE:
        chat = _fields(openapi, CHAT)
        fields = {name: fields[name] for name in FIELDS if name in fields}
        for name in (*SAMPLING, *RENAMED, "json_schema", "structural_tag"):
            typed = chat.get(RENAMED.get(name, name), {"type": "string"})
            fields[f"sampling_params.{name}"] = typed
    for name in [*fields, *(("messages", "tools") if path == CHAT else ())]:
        if values := SPECIAL.get(name.rpartition(".")[2]):
            typed = [fields[name]] if name in fields else []
            fields[name] = {"anyOf": [*typed, {"enum": list(values)}]}
    return {
        "type": "object",
        "minProperties": min(least, len(fields)),
        "maxProperties": most,
        "additionalProperties": False,
        "properties": fields,
    }


def _drawn(schema: dict[str, Any], count: int, seed: int) -> list[Any]:
    """Return contents that a schema allows, and contents that it forbids.

    Args:
        count: How many of each, about.
    """
    import hypothesis
    import schemathesis
    from hypothesis.internal.conjecture.providers import (
        AVAILABLE_PROVIDERS,
        HypothesisProvider,
    )

    class NoConstants(HypothesisProvider):
        """Draws no constants of the modules that are loaded: those depend on others."""

        def _maybe_draw_constant(self, *args: Any, **options: Any) -> None:
            return None

    AVAILABLE_PROVIDERS["vericache"] = NoConstants
    content = {"application/json": {"schema": schema}}
    operation = {
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "an answer"}},
    }
    document = {
        "openapi": "3.1.0",
        "info": {"title": "One route", "version": "1"},
        "paths": {"/": {"post": operation}},
    }
    route = schemathesis.openapi.from_dict(document)["/"]["POST"]
    found: list[Any] = []
    for mode in schemathesis.GenerationMode:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count,
            backend="vericache",
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(route.as_strategy(generation_mode=mode))
        def collect(case: Any) -> None:
            found.append(case.body)

        collect()
    return found


def _right(rng: random.Random, path: str, prompt: str) -> dict[str, Any]:
    tokens, temperature = rng.choice((4, 12, 24)), rng.choice((0, 0, 0, 0, 0.8))
    if path == GENERATE:
        params = {"temperature": temperature, "max_new_tokens": tokens}
        return {"text": prompt, "sampling_params": params}
    content = {"model": "default", "temperature": temperature, "max_tokens": tokens}
    if path == CHAT:
        return {**content, "messages": [{"role": "user", "content": prompt}]}
    return {**content, "prompt": prompt}


def _with(
    content: dict[str, Any], fields: Mapping[str, Any], rng: random.Random
) -> dict[str, Any]:
    """Replace fields of a right request, in place."""
    for name, value in fields.items():
        *outer, inner = name.split(".", 1) if "sampling_params." in name else [name]
        place = content[outer[0]] if outer else content
        place[inner] = rng.choice(NO_NUMBERS) if rng.random() < 0.02 else value
        if "logprob" in name:  # a field that only says which has to be switched on
            switch = "return_logprob" if "sampling_params" in content else "logprobs"
            content.setdefault(switch, True)
    return content


def _body(rng: random.Random, path: str, content: Any) -> Body:
    sending = rng.choice(CUT) if rng.random() < 0.12 else "whole"
    if sending.startswith("hang_up") and isinstance(content, dict):
        content = {**content, "stream": True}
    if isinstance(content, bytes):
        return Body(path, content, sending)
    data = json.dumps(content).encode()
    if rng.random() < 0.05:
        at = rng.randrange(len(data))
        broken = (data[:at], data[:at] + b"\xff" + data[at:], data + b"}", *DAMAGE)
        data = rng.choice(broken)
    return Body(path, data, sending, greedy=_is_greedy(content))


def _is_greedy(content: Any) -> bool:
    if not isinstance(content, dict):
        return True
    params = content.get("sampling_params", content)
    return not isinstance(params, dict) or params.get("temperature") == 0


async def send(
    session: aiohttp.ClientSession, url: str, body: Body, seconds: float = 60.0
) -> Reply:
    """Send a body as it wants to be sent.

    Args:
        session: For bodies that are sent whole.
        url: The server's, ``http://host:port``.
        body: What to send.
        seconds: The connection is closed after so long; the status is then 0.
    """
    if body.sending in CUT:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                await _send_cut(url, body)
        return Reply(0, b"")
    headers = {"Content-Type": "application/json"}
    try:
        async with (
            asyncio.timeout(seconds),
            session.post(url + body.path, data=body.data, headers=headers) as reply,
        ):
            return Reply(reply.status, await reply.read())
    except (aiohttp.ClientError, TimeoutError):
        return Reply(0, b"")


async def _send_cut(url: str, body: Body) -> None:
    """Send by hand what a client library would refuse to send, and hang up."""
    parts = urlsplit(url)
    head = (
        f"POST {body.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {len(body.data)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        data = body.data
        if body.sending == "half":
            data = data[: len(data) - len(data) // 4 - 1]
        writer.write(head.encode() + data)
        await writer.drain()
        if body.sending == "hang_up_late":
            await reader.read(500)
    finally:
        writer.transport.abort()
