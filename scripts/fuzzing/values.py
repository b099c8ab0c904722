"""Values that requests should not have: for any field, and for fields by name."""

from __future__ import annotations

from typing import Any


def nested(depth: int) -> list[Any]:
    """Return a list in a list, ``depth`` times."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ANY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0),
    *(1e308, float("nan"), float("inf"), float("-inf"), "", "a", "0", "null", "NaN"),
    *("\x00", "\ud800", "é" * 50, "😀", "x" * 3000, [], [[]], [None], {}, {"a": {}}),
    *([1, "a", None], {"": ""}, [{}], nested(20), nested(200), list(range(300))),
)
"""For every field: the wrong type, or the edge of the right one."""

SAMPLING: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (0, -1, 10**9, 2**31, 1.5, "8", 3000),
    "min_new_tokens": (5, 100, -1, 10**9, 2.5),
    "temperature": (-1, 1e-9, 1e-7, 1e30, 2, "0"),
    "top_p": (0, -1, 2, 1e-9, 1e-300),
    "top_k": (0, -1, -2, 1, 10**9, 2**40, 1.5),
    "min_p": (0, 1, 2, -1, 1e-9),
    "frequency_penalty": (2, -2, 3, -3, 1e-9),
    "presence_penalty": (2, -2, 3, 100),
    "repetition_penalty": (0, -1, 2, 1e-9, 1e-30, 100),
    "n": (0, -1, 2, 5, 1000, 10**9, 1.5),
    "beam_width": (0, 1, -1),
    "stop": ("", [""], ["a"] * 33, ["\x00"], [" "], ["e", ""], "x" * 2000, [1]),
    "stop_token_ids": ([-1], [586], [2**40], [20, 20], ["20"], [None], [1.5], [6]),
    "stop_regex": (
        "(",
        "(a+)+$",
        ".*",
        "",
        "[0-9]{3}",
        "(?=a)",
        "a{1000000}",
        "x" * 300,
    ),
    "regex": ("(", "", "[", ".*", "[0-9]{4}", "a{0}", "(a|b){1,200}", "\\p{L}+", "$^"),
    "json_schema": (
        *(
            "",
            "{",
            "{}",
            "true",
            '{"type": "nothing"}',
            '{"$ref": "#"}',
            '{"enum": []}',
        ),
        *('{"type": "object", "properties": {"id": {"type": "integer"}}}', "$$ANY$$"),
        *('{"type": "string", "pattern": "("}', '{"not": {}}', '{"const": "\\u0000"}'),
    ),
    "ebnf": (
        "",
        "root ::=",
        'root ::= "a"',
        "root ::= root",
        'x ::= "y"',
        "::",
        "root ::= []",
    ),
    "structural_tag": ("", "{}", "[", '{"structures": [], "triggers": []}', "null"),
    "logit_bias": (
        *({"586": 1}, {"-1": 1}, {"a": 1}, {"20": 1e308}, {"20": -100}, {"20": "a"}),
        *({"20": float("nan")}, {"20": float("inf")}, {"20": None}, {str(2**40): 1}),
        {str(token): -100.0 for token in range(586)},
    ),
    "ignore_eos": (True, "yes"),
    "skip_special_tokens": (False, "no"),
    "spaces_between_special_tokens": (False,),
    "no_stop_trim": (True,),
    "stream_interval": (0, -1, 10**9, 2),
    "sampling_seed": (0, -1, 2**63, -(2**63), 1.5, "1"),
    "custom_params": (
        *({"vericache": value} for value in (None, 1, "off", [], {}, True)),
        *({"vericache": {"enabled": value}} for value in (False, 0, "no", None, {})),
        *(
            {"vericache": {"draft_length": value}}
            for value in (0, -1, 1, 10**9, 2**70, 1.5, "8", True, None, [8])
        ),
        *({"vericache": {"keep": 1}}, {"vericache": {"": ""}}, {"__req__": 1}),
        {"__sglang_reasoning_end_token_ids": [-1]},
    ),
    "stop_strs": ("a", [None]),
    "stop_str_max_len": (-1, 10**9),
    "is_normalized": (True,),
}
"""Fields of ``sampling_params`` of ``/generate``."""

REQUEST: dict[str, tuple[Any, ...]] = {
    "text": ("", [""], [], "x" * 40000, "\x00", ["a", 1], "\ud800", "<|im_end|>" * 40),
    "input_ids": (
        *([], [[]], [586], [-1], [2**31], [2**63], [0], ["1"], [1.5], [20] * 5000),
        *([[20] * 80, []], [[20] * 80, [30] * 90], [None], [20] * 2047, [20] * 2048),
    ),
    "input_embeds": ([[0.0]], [[0.0] * 128] * 4, [], [[]], [["a"]]),
    "image_data": ("", "nothing", ["nothing"], {}),
    "audio_data": ("nothing",),
    "video_data": (["nothing"],),
    "rid": (
        "",
        "a" * 5000,
        "é\n\r",
        "same",
        "same",
        ["same"],
        "HEALTH_CHECK_1",
        "\x00",
        5,
    ),
    "return_logprob": (True, [True], "yes"),
    "logprob_start_len": (-2, 0, 5, 10**9, -(10**9), 0.5, [0]),
    "top_logprobs_num": (-1, 1, 5, 585, 586, 587, 10**9, 0.5, [1]),
    "token_ids_logprob": ([], [-1], [586], [2**40], [[1]], [1, 2], [20] * 1000, 7),
    "return_text_in_logprobs": (True,),
    "return_hidden_states": (True, "last", "all"),
    "return_sampling_mask": (True,),
    "return_routed_experts": (True,),
    "return_entropy": (True,),
    "return_bytes": (True,),
    "return_flat_raw_top_logprobs": (True,),
    "stream": (True, "yes"),
    "session_params": (
        *({}, {"id": "nothing"}, {"id": 1}, {"id": None, "rid": "same"}),
        *({"id": "fuzz-session"}, {"id": "fuzz-session", "offset": -5, "rid": "x"}),
    ),
    "lora_path": ("", "nothing", ["nothing"], "../../etc"),
    "custom_logit_processor": ("", "garbage", "{}", '{"callable": "80"}', ["{}"]),
    "priority": (-1, 10**9, 2**70, 1.5),
    "extra_key": ("", "x", ["x"], "é" * 1000),
    "data_parallel_rank": (-1, 0, 1, 10**9),
    "routed_dp_rank": (-1, 0, 1),
    "bootstrap_room": (-1, 0, 2**63),
    "bootstrap_host": ("nothing",),
    "background": (True,),
    "require_reasoning": (True,),
    "max_thinking_tokens": (0, -1, 10**9),
    "modalities": (["image"], [1]),
    "received_time": (-1.0, 1e300),
    "positional_embed_overrides": ({}, [], "a"),
    "nothing_known": (1,),
}
"""Fields of ``/generate`` beside ``sampling_params``."""

OPENAI: dict[str, tuple[Any, ...]] = {
    "model": ("", "nothing", "default:lora", "../x", None),
    "logprobs": (True, 0, 5, 586, 10**6, -1),
    "top_logprobs": (0, 5, 20, 586, 587, 10**6, -1),
    "echo": (True,),
    "best_of": (0, 2, -1),
    "suffix": ("x",),
    "user": ("x" * 1000,),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": "x"}, []),
    "response_format": (
        *({}, {"type": "json_object"}, {"type": "text"}, {"type": "nothing"}),
        *({"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}),
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": []}}},
        {"type": "structural_tag", "structures": [], "triggers": []},
    ),
    "tools": (
        *([], [{}], [{"type": "function"}], [{"type": "function", "function": {}}]),
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
        [{"type": "function", "function": {"name": "f", "parameters": {}}}] * 40,
    ),
    "tool_choice": ("auto", "required", "none", "x", {"type": "function"}),
    "messages": (
        *([], [{}], [{"role": "x", "content": "a"}], [{"role": "user"}], ["a"], "a"),
        *([{"role": "user", "content": None}], [{"role": "user", "content": []}]),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "text"}, {"type": "x"}]}],
        [{"role": "assistant", "content": "a"}] * 50,
        [{"role": "tool", "content": "a", "tool_call_id": "x"}],
        [{"role": "user", "content": "x" * 40000}],
    ),
    "prompt": (
        "",
        [],
        [""],
        [[]],
        [586],
        [-1],
        ["a", "b"],
        [[20] * 80] * 2,
        "x" * 40000,
    ),
    "chat_template_kwargs": ({}, {"thinking": True}, {"messages": []}, {"tools": 1}),
    "continue_final_message": (True,),
    "reasoning_effort": ("low", "x", 5),
    "separate_reasoning": (False,),
    "return_token_ids": (True,),
    "return_meta_info": (True,),
    "seed": (0, -1, 2**63, 2**70),
    "cache_salt": ("x", ["x"]),
    "session_id": ("x", "\n"),
    "custom_labels": ({}, {"a": "b"}, {"a": 1}),
    "input_ids": ([], [586], [20] * 80),
    "max_completion_tokens": (0, -1, 10**9),
}
"""Fields of the OpenAI routes beside those of ``sampling_params``."""

RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""What the OpenAI routes call fields of ``sampling_params``."""

CONTENT_TYPES: tuple[str | None, ...] = (
    *("text/plain", None, "application/xml", "application/json; charset=utf-16", ""),
    *("multipart/form-data", "application/x-www-form-urlencoded", "é", "json", "*/*"),
)
