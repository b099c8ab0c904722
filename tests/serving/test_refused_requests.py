"""What a request is refused for, before SGLang's scheduler sees it."""

import pytest

from vericache_sglang.config.schema import VeriCacheConfig
from vericache_sglang.errors import QUOTED, ConfigError, quoted
from vericache_sglang.evaluation.odd_requests import ODD
from vericache_sglang.serving.refused_requests import (
    MOST_COPIES,
    check_copies,
    check_request,
    limits,
)

pytestmark = pytest.mark.sglang

VOCABULARY, CONFIG = 586, VeriCacheConfig(draft_length=8)


def check(body):
    """Hold one body of ``/generate`` against the limits, as the hooks do."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(**body)
    check_copies(request.sampling_params)
    request.normalize_batch_and_arguments()
    one = request if request.is_single else request[0]
    ids = [1, 2, 3] if one.input_ids is None else one.input_ids
    check_request(one, ids, limits(VOCABULARY, CONFIG, frozenset({"m"})))


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.name)
def test_an_odd_request_is_refused_by_name_and_briefly(odd):
    with pytest.raises(ConfigError, match=odd.name) as refusal:
        check(odd.generate("text"))
    assert len(str(refusal.value)) < 200


HEALTHY = [
    {},
    {"temperature": None, "top_p": None, "stop_token_ids": None},
    {"stop_token_ids": [119690]},  # of another vocabulary: it ends nothing
    {"temperature": 0, "max_new_tokens": 3, "top_k": -1, "n": 128},
    {"stop_token_ids": [0, 585, None], "min_new_tokens": 3, "logit_bias": {"5": -100}},
    {"logit_bias": {5: 1.5}, "stop": ["a", ""], "stop_regex": [r"[0-9]{3}", r"\n\n+"]},
    {"stop_regex": r"(?i)\bstop\b[ .!]{0,8}$", "frequency_penalty": 2},
    {"custom_params": {"vericache": {"draft_length": 8}, "other": [[1], {"a": {}}]}},
    {"json_schema": "{}", "ignore_eos": True, "sampling_seed": -(2**63)},
    {"repetition_penalty": 1e-6, "stream_interval": 1, "min_p": 1, "regex": "a*b*c*"},
    {"n": MOST_COPIES},
]


@pytest.mark.parametrize("params", HEALTHY)
def test_a_healthy_request_is_not_refused(params):
    check({"text": "text", "sampling_params": params})


@pytest.mark.parametrize(
    "fields",
    [
        {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 586},
        {"return_logprob": True, "token_ids_logprob": [0, 585]},
        {"session_params": {"id": "s"}, "priority": -5, "extra_key": "a", "rid": "r"},
        {
            "session_params": {"id": "s", "offset": None},
            "custom_labels": {"m": "m"},
        },
        {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2**40},
    ],
)
def test_other_fields_are_not_refused(fields):
    check({"input_ids": [0, 585], **fields})


def test_a_prompt_without_tokens_is_refused_outside_a_session():
    from sglang.srt.managers.io_struct import GenerateReqInput

    request = GenerateReqInput(text="")
    request.normalize_batch_and_arguments()
    with pytest.raises(ConfigError, match="input_ids"):
        check_request(request, [], limits(VOCABULARY, CONFIG))


@pytest.mark.parametrize(
    "value",
    [10**5000, "x" * 10**6, ["y" * 100] * 10**5, {"a": {"b": [1] * 1000}}],
    ids=["integer", "text", "list", "object"],
)
def test_a_value_of_any_size_is_quoted_briefly(value):
    assert len(quoted(value)) <= QUOTED


def test_what_cannot_be_shown_is_named_by_its_type():
    class Rude:
        def __repr__(self):
            raise ValueError("no")

    assert "Rude" in quoted(Rude())
