"""Malformed requests, each in one field, that crash or pass plain SGLang 0.5.21.

VeriCache answers them with status 400 and names the field (docs/upstream.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vericache_sglang.evaluation.left_out import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterator

GENERATE, COMPLETION, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"

OPENAI_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


@dataclass(frozen=True, slots=True)
class OddRequest:
    """One request that is wrong in one field.

    Attributes:
        name: The field; what the refusal names.
        params: Of ``sampling_params``.
        request: Other fields of ``/generate``; ``input_ids`` replace its text.
        routes: The OpenAI routes that pass the field on.
        openai: Fields of those routes, where they are not ``params``.
    """

    name: str
    params: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    routes: tuple[str, ...] = ()
    openai: dict[str, Any] = field(default_factory=dict)

    @property
    def is_json(self) -> bool:
        """Whether JSON can express all its values (not NaN)."""
        return all(value == value for value in self.params.values())

    def generate(self, prompt: str) -> dict[str, Any]:
        """Return the body for ``/generate``."""
        params = {"temperature": 0, "max_new_tokens": 8, **self.params}
        body = {"text": prompt, **self.request, "sampling_params": params}
        if "input_ids" in self.request:
            del body["text"]
        return body

    def bodies(self, prompt: str, ids: list[int]) -> Iterator[tuple[str, Any]]:
        """Yield (route, body): alone, behind a healthy one in a batch, and OpenAI's.

        Args:
            prompt: A healthy prompt.
        """
        if self.is_json:
            yield GENERATE, self.generate(prompt)
        healthy = {"temperature": 0, "max_new_tokens": 8}
        if "input_ids" in self.request:
            both = [ids, self.request["input_ids"]]
            yield GENERATE, {"input_ids": both, "sampling_params": healthy}
        elif self.params and "n" not in self.params and self.is_json:
            several = [healthy, {**healthy, **self.params}]
            yield GENERATE, {"text": [prompt, prompt], "sampling_params": several}
        own = {OPENAI_NAMES.get(name, name): v for name, v in self.params.items()}
        more = {"model": "default", "temperature": 0, "max_tokens": 8, **own}
        more.update(self.openai)
        if COMPLETION in self.routes:
            yield COMPLETION, {"prompt": prompt, **more}
        if CHAT in self.routes:
            said = [{"role": "user", "content": prompt}]
            yield CHAT, {"messages": said, **more}


BOTH = (COMPLETION, CHAT)
LARGE = {"filler": "x" * 20_000}


def _params(name: str, value: Any, *routes: str, **more: Any) -> OddRequest:
    return OddRequest(name, {name: value, **more}, routes=routes)


def _request(name: str, value: Any, **more: Any) -> OddRequest:
    return OddRequest(name, request={name: value, **more})


def _tokens(ids: list[int]) -> OddRequest:
    asked = {"prompt": ids}
    return OddRequest("input_ids", {}, {"input_ids": ids}, (COMPLETION,), asked)


ODD: tuple[OddRequest, ...] = (
    *(_tokens([-1]), _tokens([VOCABULARY]), _tokens([5, 2**40, 5])),
    _params("stop_token_ids", [1_000_000], *BOTH, min_new_tokens=3),
    _params("stop_token_ids", [-1], *BOTH),
    _params("stop_token_ids", ["a"]),
    _params("logit_bias", {"5": "x"}, *BOTH),
    _params("logit_bias", {"5": None}),
    _params("logit_bias", {str(VOCABULARY): 1}, *BOTH),
    _params("logit_bias", {"5": 1e308}, *BOTH),
    *(_params("top_k", value, *BOTH) for value in (2**40, 2**31)),
    _params("stop_regex", ["(a+)+$", "(.*)*x"], *BOTH),
    _params("stop_regex", "(a|aa)+$", *BOTH),
    _params("stop_regex", [r"\s+User"]),
    _params("stop_regex", ["(?:a?){40}a{40}"]),
    _params("custom_params", LARGE, *BOTH),
    _params("custom_params", [1]),
    *(_params("n", value, *BOTH) for value in (10**9, 0)),
    *(_params("n", value) for value in (-1, "4", 1.5)),
    _params("max_new_tokens", "8"),
    _params("max_new_tokens", 1.5),
    _params("min_new_tokens", 2**40, max_new_tokens=None),
    *(_params("temperature", value) for value in ("0", float("nan"))),
    _params("repetition_penalty", 1e-30, *BOTH, temperature=1),
    *(_params("stream_interval", value) for value in (0, -1)),
    *(_params("regex", 5), _params("stop", 5), _params("stop", ["a", 1])),
    _params("ignore_eos", "yes"),
    _params("is_normalized", True),
    _params("nothing_known", 1),
    _request("logprob_start_len", -5, return_logprob=True),
    OddRequest(
        "top_logprobs_num",
        {},
        {"top_logprobs_num": 10**6, "return_logprob": True},
        (CHAT,),
        {"logprobs": True, "top_logprobs": 10**6},
    ),
    _request("top_logprobs_num", -1, return_logprob=True),
    _request("top_logprobs_num", [1], return_logprob=True),
    _request("return_logprob", [True]),
    _params("n", None),
    _request("positional_embed_overrides", {"embeds": 1}),
    _request("priority", 2**70),
    *(_request("session_params", params) for params in ({"id": 1}, {"nothing": 1})),
    _request("custom_labels", {"nothing_known": "b"}),
    *(_request("custom_logit_processor", text) for text in ("garbage", "{}", "[]")),
    _request("custom_logit_processor", '{"callable": "not hex"}'),
)
"""Every request is refused; ``name`` is in the message."""

Fields = tuple[dict[str, Any], dict[str, Any]]


def _sent(*requests: dict[str, Any]) -> tuple[Fields, ...]:
    return tuple(({}, fields) for fields in requests)


LOGPROBS = {"return_logprob": True, "logprob_start_len": 0}

STRANGE: dict[str, tuple[Fields, ...]] = {
    "image": _sent(
        *({"image_data": image} for image in ("nothing", "/etc/passwd", ["a", "b"])),
        {"image_data": "http://127.0.0.1:1/x.png", "modalities": ["image"]},
        *({"video_data": "x"}, {"audio_data": "x"}, {"mm_hashes": ["zz"]}),
        {"images_config": {"a": 1}, "max_dynamic_patch": -1},
    ),
    "lora": _sent({"lora_id": "x"}, {"lora_path": "x"}, {"lora_path": ["x"]}),
    "bootstrap": _sent(
        {"bootstrap_host": "1.2.3.4", "bootstrap_port": 99999, "bootstrap_room": 2**63},
        {"bootstrap_room": -1, "bootstrap_host": ""},
        {"bootstrap_pair_key": "x", "decode_tp_size": 0, "disagg_prefill_dp_rank": 99},
        {"routed_dp_rank": 99},
    ),
    "pooling": _sent(
        *({"multi_item_delimiter_indices": [at]} for at in (5, 10**9, -1)),
        *({"token_indices_to_pool": [at]} for at in (5, 10**9, -(10**9))),
    ),
    "logprobs": _sent(
        {**LOGPROBS, "top_logprobs_num": VOCABULARY},
        {**LOGPROBS, "token_ids_logprob": [20] * 5000},
        {**LOGPROBS, "logprob_start_len": 10**9},
        {**LOGPROBS, "top_logprobs_num": 3, "return_flat_raw_top_logprobs": True},
        {"token_ids_logprob": [VOCABULARY], "return_logprob": True},
    ),
    "session": _sent(
        {"session_params": {"id": "unknown"}},
        {"session_params": {"id": None, "offset": -5, "rid": "x"}},
        {"session_id": "x" * 10_000},
    ),
    "internal": _sent(
        {"encoder_urls": ["http://127.0.0.1:1"], "need_wait_for_mm_inputs": True},
        {"http_worker_ipc": "ipc:///nowhere"},
        *({"received_time": at} for at in (-1e300, 1e300)),
        {"external_trace_header": {"a": 1}},
        {"kv_hints": {"a": 1}},
        *({"rid": rid} for rid in ("\x00", "HEALTH_CHECK_1", "a" * 100_000)),
        *({"extra_key": "x" * 100_000}, {"routing_key": "x" * 100_000}),
        *({"return_routed_experts": True}, {"return_indexer_topk": True}),
        *({"return_hidden_states": True}, {"return_sampling_mask": True}),
        {"require_reasoning": True, "max_thinking_tokens": 3},
    ),
    "parameters": (
        ({"logit_bias": {str(i): -1e9 for i in range(VOCABULARY)}, "top_p": 0.5}, {}),
        ({"logit_bias": {"20": 1e9}, "temperature": 2e-6, "min_p": 1}, {}),
        ({"repetition_penalty": 1e-6, "temperature": 2e-6}, {}),
        ({"temperature": 1e30, "top_k": 2**31 - 1, "top_p": 1e-300}, {}),
        ({"max_new_tokens": 2**70}, {}),
        ({"beam_width": 10**9}, {}),
        ({"custom_params": {"a": {"b": {"c": [[1]]}}, "__req__": 1}}, {}),
        ({"custom_params": {"thinking_budget": "x"}}, {}),
        ({"json_schema": '{"type": "object", "properties": {"a": {"$ref": "#"}}}'}, {}),
        ({"regex": "(a|b){1,200}"}, {}),
        ({"ebnf": "root ::= root"}, {}),
        ({"ebnf": "root ::= root", "temperature": 0.8}, {}),
        ({"ebnf": "root ::= root", "temperature": 0.8, "top_k": 9}, {}),
        ({"structural_tag": "{}"}, {}),
    ),
}
"""Requests that may be answered or refused: ``sampling_params`` and other fields."""
