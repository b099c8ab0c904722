"""Requests that plain SGLang 0.5.21 does not survive; both servers are spared them.

Most rules cover a request that was seen to end or hang it (``--disable-vericache``);
the others follow from its source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VOCABULARY = 586
"""Size of the demo model's vocabulary."""

MOST_COPIES = 2000
"""Largest ``n`` that is sent."""

UNCHECKED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("n", "beam_width", "stream_interval"), (int,)),
    **dict.fromkeys(("max_new_tokens", "min_new_tokens"), (int, str)),
    **dict.fromkeys(("regex", "json_schema", "ebnf", "structural_tag"), (str,)),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "no_stop_trim"), (bool,)),
    **dict.fromkeys(("spaces_between_special_tokens",), (bool,)),
    **dict.fromkeys(("stop", "stop_regex"), (str, list)),
    **dict.fromkeys(("logit_bias", "custom_params"), (dict,)),
}
"""Fields of ``/generate`` whose type nobody checks, and the types that are safe."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests that are not sent.

    Attributes:
        crashes: Says whether plain SGLang does not survive the fields of a request;
            ``sampling_params`` are among them.
        reason: What happens.
    """

    crashes: Callable[[dict[str, Any]], bool]
    reason: str


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int):
        yield value


def _unknown_token(fields: dict[str, Any]) -> bool:
    values = [fields.get("input_ids")]
    if isinstance(fields.get("prompt"), list):
        values.append(fields["prompt"])
    return any(
        not 0 <= number < VOCABULARY for value in values for number in _numbers(value)
    )


def _no_prompt(fields: dict[str, Any]) -> bool:
    tokens = fields.get("input_ids")
    return isinstance(tokens, list) and (not tokens or [] in tokens)


def _wrong_bias(fields: dict[str, Any]) -> bool:
    bias = fields.get("logit_bias")
    return isinstance(bias, dict) and not all(
        isinstance(value, (int, float)) for value in bias.values()
    )


def _wrong_type(fields: dict[str, Any]) -> bool:
    names = UNCHECKED if "sampling_params" in fields else ("custom_params",)
    return any(
        fields.get(name) is not None and not isinstance(fields[name], UNCHECKED[name])
        for name in names
    )


def _too_many_copies(fields: dict[str, Any]) -> bool:
    copies = fields.get("n")
    return isinstance(copies, int) and copies > MOST_COPIES


def _wide_top_k(fields: dict[str, Any]) -> bool:
    top_k = fields.get("top_k")
    if not isinstance(top_k, (int, float)):
        return False
    return not math.isfinite(top_k) or top_k >= 2**31


def _list_for_one(fields: dict[str, Any]) -> bool:
    names = ("top_logprobs_num", "logprob_start_len", "return_logprob")
    return any(isinstance(fields.get(name), list) for name in names)


def _start_before_prompt(fields: dict[str, Any]) -> bool:
    start = fields.get("logprob_start_len")
    return isinstance(start, (int, float)) and start < -1


def _no_embeddings(fields: dict[str, Any]) -> bool:
    return fields.get("positional_embed_overrides") is not None


def _claims_normalized(fields: dict[str, Any]) -> bool:
    return bool(fields.get("is_normalized"))


def _many_logprobs(fields: dict[str, Any]) -> bool:
    counts = [
        fields.get(name) for name in ("top_logprobs_num", "top_logprobs", "logprobs")
    ]
    return any(number > VOCABULARY for count in counts for number in _numbers([count]))


def _no_distribution(fields: dict[str, Any]) -> bool:
    if fields.get("temperature") == 0:
        return False
    bias = fields.get("logit_bias")
    values = bias.values() if isinstance(bias, dict) else ()
    penalty = fields.get("repetition_penalty")
    return any(
        isinstance(value, float) and not abs(value) < 1e30 for value in values
    ) or (isinstance(penalty, float) and 0 < penalty < 1e-6)


LEFT_OUT: tuple[Rule, ...] = (
    Rule(
        _unknown_token,
        "token ids outside the vocabulary: IndexError in the embedding",
    ),
    Rule(_no_prompt, "no token ids in input_ids: an error in the model's forward"),
    Rule(_wrong_bias, "logit_bias that is no number: TypeError in the batch"),
    Rule(
        _wrong_type,
        "sampling_params of the wrong type are not checked by /generate: TypeError in "
        "the scheduler or the detokenizer",
    ),
    Rule(_too_many_copies, "n is expanded to requests without a bound"),
    Rule(
        _list_for_one,
        "a list in a field of log-probabilities of a single request: TypeError",
    ),
    Rule(
        _start_before_prompt,
        "logprob_start_len below -1: AssertionError in the scheduler",
    ),
    Rule(
        _no_embeddings,
        "positional_embed_overrides comes from JSON unconverted: AttributeError",
    ),
    Rule(
        _claims_normalized,
        "is_normalized keeps temperature 0 from becoming greedy: logits divided by 0",
    ),
    Rule(_many_logprobs, "more log-probabilities than tokens: RuntimeError in topk"),
    Rule(
        _no_distribution,
        "sampling from logits that a bias or penalty made infinite: RuntimeError",
    ),
    Rule(_wide_top_k, "top_k does not fit 32 bits: RuntimeError in the batch"),
)
"""Everything that is left out."""


def left_out(content: dict[str, Any]) -> bool:
    """Say whether plain SGLang does not survive a request.

    Args:
        content: Its body.
    """
    params = content.get("sampling_params")
    fields = {**content, **(params if isinstance(params, dict) else {})}
    return any(rule.crashes(fields) for rule in LEFT_OUT)
