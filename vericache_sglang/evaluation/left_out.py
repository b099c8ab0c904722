"""Requests that crash or hang plain SGLang 0.5.21; they are sent to neither server.

Most rules cover a request that was observed to end or hang it
(``--disable-vericache``); the others follow from its source.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Fields = Mapping[str, Any]
    """Of a request; ``sampling_params`` are among them."""

VOCABULARY = 586
"""Size of the demo model's vocabulary."""

MOST_COPIES = 2000
"""Largest ``n`` that is sent."""

SINGLE = ("top_logprobs_num", "logprob_start_len", "return_logprob")
"""Fields that are lists only where there are several prompts."""

UNCHECKED: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("n", "beam_width", "stream_interval"), (int,)),
    **dict.fromkeys(("max_new_tokens", "min_new_tokens"), (int, str)),
    **dict.fromkeys(("regex", "json_schema", "ebnf", "structural_tag"), (str,)),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "no_stop_trim"), (bool,)),
    **dict.fromkeys(("spaces_between_special_tokens",), (bool,)),
    **dict.fromkeys(("stop", "stop_regex"), (str, list)),
    **dict.fromkeys(("logit_bias", "custom_params"), (dict,)),
}
"""Unchecked fields of ``/generate`` -> types that are safe."""


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int):
        yield value


def _listed(fields: Fields, *names: str) -> list[int]:
    """Return the whole numbers in fields that are lists."""
    lists = [fields.get(name) for name in names]
    return [n for found in lists if isinstance(found, list) for n in _numbers(found)]


def _real(fields: Fields, name: str, default: float = 0.0) -> float:
    value = fields.get(name)
    return value if isinstance(value, (int, float)) else default


def _biases(fields: Fields) -> list[Any]:
    bias = fields.get("logit_bias")
    return [*bias.values()] if isinstance(bias, dict) else []


def _empty(fields: Fields) -> bool:
    tokens = fields.get("input_ids")
    return isinstance(tokens, list) and (not tokens or [] in tokens)


def _wrong_type(fields: Fields) -> bool:
    names = UNCHECKED if "sampling_params" in fields else ("custom_params",)
    return any(
        fields.get(name) is not None and not isinstance(fields[name], UNCHECKED[name])
        for name in names
    )


def _logprobs(fields: Fields) -> list[int]:
    names = ("top_logprobs_num", "top_logprobs", "logprobs")
    return [number for name in names for number in _numbers([fields.get(name)])]


def _endless(fields: Fields) -> bool:
    """Return whether logits become infinite and something is drawn from them."""
    biases = [value for value in _biases(fields) if isinstance(value, (int, float))]
    huge = any(not abs(value) < 1e30 for value in biases)
    tiny = 0 < _real(fields, "repetition_penalty", 1.0) < 1e-6
    return fields.get("temperature") != 0 and (huge or tiny)


LEFT_OUT: Mapping[str, Callable[[Fields], bool]] = {
    "token ids outside the vocabulary: IndexError in the embedding": lambda fields: any(
        not 0 <= n < VOCABULARY for n in _listed(fields, "input_ids", "prompt")
    ),
    "no token ids in input_ids: an error in the model's forward": _empty,
    "logit_bias that is no number: TypeError in the batch": lambda fields: any(
        not isinstance(value, (int, float)) for value in _biases(fields)
    ),
    "sampling_params of the wrong type are not checked by /generate: TypeError in the "
    "scheduler or the detokenizer": _wrong_type,
    "n is expanded to requests without a bound": lambda fields: (
        _real(fields, "n") > MOST_COPIES
    ),
    "a list in a field of log-probabilities of a single request: TypeError": (
        lambda fields: any(isinstance(fields.get(name), list) for name in SINGLE)
    ),
    "logprob_start_len below -1: AssertionError in the scheduler": lambda fields: (
        _real(fields, "logprob_start_len") < -1
    ),
    "more log-probabilities than tokens: RuntimeError in topk": lambda fields: any(
        n > VOCABULARY for n in _logprobs(fields)
    ),
    "sampling from logits that a bias or penalty made infinite: RuntimeError": _endless,
    "top_k does not fit 32 bits: RuntimeError in the batch": lambda fields: (
        not math.isfinite(_real(fields, "top_k"))
        or abs(_real(fields, "top_k")) >= 2**31
    ),
}
"""Excluded requests: consequence -> predicate."""


def left_out(content: Mapping[str, Any]) -> bool:
    """Return whether a request crashes or hangs plain SGLang.

    Args:
        content: Body of the request.
    """
    params = content.get("sampling_params")
    fields = {**content, **(params if isinstance(params, dict) else {})}
    return any(crashes(fields) for crashes in LEFT_OUT.values())
