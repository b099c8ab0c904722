"""Bodies no client should send, drawn from a seed: the same seed, the same bodies."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from fuzzing.left_out import left_out
from fuzzing.values import ANY, CONTENT_TYPES, OPENAI, RENAMED, REQUEST, SAMPLING

GENERATE, CHAT, COMPLETION = "/generate", "/v1/chat/completions", "/v1/completions"

OTHERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/embeddings", {"model": "default", "input": "a"}),
    ("/encode", {"text": "a"}),
    ("/classify", {"text": "a"}),
    ("/tokenize", {"model": "default", "prompt": "a"}),
    ("/v1/tokenize", {"model": "default", "prompt": "a", "add_special_tokens": True}),
    ("/detokenize", {"model": "default", "tokens": [20, 30]}),
    ("/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [20]}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/v1/responses", {"model": "default", "input": "a", "max_output_tokens": 8}),
    (
        "/v1/messages",
        {"max_tokens": 8, "messages": [{"role": "user", "content": "a"}]},
    ),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/api/generate", {"model": "default", "prompt": "a", "stream": False}),
    ("/api/chat", {"model": "default", "messages": [], "stream": False}),
    ("/invocations", {"model": "default", "messages": []}),
    ("/vertex_generate", {"instances": [{"text": "a"}], "parameters": {}}),
    ("/parse_function_call", {"text": "a", "tools": [], "tool_call_parser": "llama3"}),
    ("/separate_reasoning", {"text": "a", "reasoning_parser": "deepseek-v3"}),
    ("/open_session", {"capacity_of_str_len": 1000, "session_id": "fuzz-session"}),
    ("/close_session", {"session_id": "fuzz-session"}),
    ("/abort_request", {"rid": "same"}),
    ("/abort_request", {"rid": "", "abort_all": True}),
    ("/flush_cache", {}),
    ("/get_server_info", {}),
    ("/v1/models/nothing", {}),
    ("/nothing", {"a": 1}),
)
"""Other routes, each with a body it knows."""

SENDING = ("hang_up", "hang_up_late", "half", "pipelined", "pieces")
"""How a body is sent, other than at once: closed before or after the first bytes of
the answer, closed within the body, twice on one connection, and in two pieces."""


@dataclass(frozen=True)
class Body:
    """One request.

    Attributes:
        path: Route.
        data: The bytes sent as its body.
        content_type: Header; None sends none.
        method: HTTP method.
        sending: ``whole`` or one of ``SENDING``.
        changes: What was done to a request that was right.
        greedy: Its answer, if it has one, is a function of the request.
    """

    path: str
    data: bytes
    content_type: str | None = "application/json"
    method: str = "POST"
    sending: str = "whole"
    changes: tuple[str, ...] = field(default=())
    greedy: bool = True

    @property
    def aborts_all(self) -> bool:
        """Whether it may end every request that runs."""
        return self.path == "/abort_request" and b"abort_all" in self.data


def draw(seed: int, count: int, prompts: list[str]) -> list[Body]:
    """Draw ``count`` bodies around ``prompts``, which a server would draft for."""
    rng = random.Random(seed)
    return [_one(rng, prompts) for _ in range(count)]


def _one(rng: random.Random, prompts: list[str]) -> Body:
    path = rng.choices((GENERATE, CHAT, COMPLETION, "other"), weights=(50, 18, 14, 18))[
        0
    ]
    known, content = _right(rng, path, rng.choice(prompts))
    if path == "other":
        path, content = rng.choice(OTHERS)
        content = deepcopy(content)
        known = dict.fromkeys((*content, "nothing_known"), ())
    changes = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        changes.append(_change(rng, known, content))
    greedy = not any("temperature" in change for change in changes)
    sending, method, kind = "whole", "POST", "application/json"
    if rng.random() < 0.2:
        sending = rng.choice(SENDING)
        if sending.startswith("hang_up"):
            content["stream"] = True
    data = json.dumps(content).encode()
    if rng.random() < 0.15:
        name, data = _damage(rng, data)
        changes.append(name)
    if rng.random() < 0.05:
        kind = rng.choice(CONTENT_TYPES)
    if rng.random() < 0.02:
        method = rng.choice(("GET", "PUT", "DELETE", "HEAD", "NOTHING"))
    return Body(path, data, kind, method, sending, tuple(changes), greedy)


def _right(
    rng: random.Random, path: str, prompt: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that may change, with their values, and a right body."""
    tokens = rng.choice((4, 12, 24))
    if path == GENERATE:
        known: dict[str, Any] = dict(REQUEST)
        for name, values in SAMPLING.items():
            known[f"sampling_params.{name}"] = values
        known["sampling_params"] = ([], [{}], "", {})
        params = {"temperature": 0, "max_new_tokens": tokens}
        return known, {"text": prompt, "sampling_params": params}
    known = {RENAMED.get(name, name): values for name, values in SAMPLING.items()}
    known |= {name: REQUEST[name] for name in ("rid", "priority", "session_params")}
    known |= {name: REQUEST[name] for name in ("custom_logit_processor", "lora_path")}
    known |= OPENAI
    content = {"model": "default", "temperature": 0, "max_tokens": tokens}
    if path == CHAT:
        content["messages"] = [{"role": "user", "content": prompt}]
        known.pop("prompt")
    else:
        content["prompt"] = prompt
        known.pop("messages")
    return known, content


def _change(rng: random.Random, known: dict[str, Any], content: dict[str, Any]) -> str:
    """Change one field of ``content`` in place and return what was done."""
    name = rng.choice(list(known))
    *outer, inner = name.split(".")
    place = content
    for part in outer:
        if not isinstance(place.get(part), dict):
            place[part] = {}
        place = place[part]
    if rng.random() < 0.05 and not left_out({**content, inner: None}):
        place.pop(inner, None)
        return f"{name} left out"
    special = known[name]
    while True:
        place[inner] = value = rng.choice(
            special if special and rng.random() < 0.7 else ANY
        )
        _switch_on(inner, content)
        if not left_out(content):
            break
    return f"{name} = {value!r}"[:120]


def _switch_on(field_name: str, content: dict[str, Any]) -> None:
    """Ask for log-probabilities where a field only says which."""
    if "logprob" not in field_name:
        return
    if "sampling_params" in content:
        content.setdefault("return_logprob", True)
    elif "messages" in content:
        content.setdefault("logprobs", True)


def _damage(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    at = rng.randrange(len(data)) if data else 0
    ways: dict[str, bytes] = {
        "cut off": data[:at],
        "no body": b"",
        "a byte that is no UTF-8": data[:at] + b"\xff" + data[at:],
        "half a UTF-8 character": data[:at] + b"\xe2\x82" + data[at:],
        "a zero byte": data[:at] + b"\x00" + data[at:],
        "byte order mark": b"\xef\xbb\xbf" + data,
        "as UTF-16": data.decode(errors="replace").encode("utf-16"),
        "more after the end": data + b"}",
        "twice": data + data,
        "one byte flipped": data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :],
        "each field twice": data[:-1] + b", " + data[1:] if len(data) > 2 else data,
        "deep lists": b"[" * 100_000,
        "deep objects": b'{"text":' * 5_000 + b"1" + b"}" * 5_000,
        "a list": b"[" + data + b"]",
        "null": b"null",
        "a string": json.dumps(data.decode(errors="replace")).encode(),
        "a huge number": data[:-1] + b', "priority": 1' + b"0" * 5_000 + b"}",
        "spaces": b" " * 100_000 + data,
    }
    return rng.choice(list(ways.items()))
