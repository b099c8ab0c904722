"""Refuses malformed requests with status 400 before SGLang's scheduler sees them.

SGLang 0.5.21 passes most of them to the process that serves every request, which then
crashes (docs/upstream.md). Types come from SGLang's annotations; bounds are below.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from vericache_sglang.errors import ConfigError, quoted
from vericache_sglang.runtime.request_options import read_options
from vericache_sglang.serving.stop_patterns import check_stop_patterns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vericache_sglang.config.schema import VeriCacheConfig

MOST_COPIES = 2048
"""Bound on ``n``: SGLang creates a request for each copy before it validates them."""

MOST_CUSTOM_BYTES = 16384
"""Bound on ``custom_params`` as JSON: it is broadcast to every rank."""

MOST_BIAS = 1e9
"""Bound on a ``logit_bias``: a logit stays finite after it and any temperature."""

_INT32, _INT64 = 2**31 - 1, 2**63 - 1

PARAMETER_BOUNDS: dict[str, tuple[float, float]] = {
    "top_k": (-1, _INT32),
    "min_new_tokens": (0, _INT32),
    "stream_interval": (1, _INT32),
    "repetition_penalty": (1e-6, 2),
    "n": (1, MOST_COPIES),
}
"""Lowest and highest value of ``sampling_params`` that SGLang does not check."""

REQUEST_BOUNDS: dict[str, tuple[float, float]] = {
    "logprob_start_len": (-1, _INT32),
    "routed_experts_start_len": (0, _INT32),
    "priority": (-_INT64, _INT64),
}
"""Lowest and highest value of a request's other fields."""

INTERNAL = (
    *("is_normalized", "stop_strs", "stop_str_max_len"),
    *("stop_regex_strs", "stop_regex_max_len"),
)
"""Fields of ``sampling_params`` that only SGLang itself may set."""

UNTYPED = ("logit_bias", "custom_params", "stop_token_ids")
"""Fields of ``sampling_params`` that are checked entry by entry."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that requests are checked against.

    Attributes:
        vocabulary: Rows of the model's embedding.
        config: The server's.
        parameter_types: Type of each field of ``sampling_params``.
        request_types: Type of each other field that is checked here.
        session_types: Type of each field of ``session_params``.
        labels: Allowed names in ``custom_labels``; None if no metric has labels.
    """

    vocabulary: int
    config: VeriCacheConfig
    parameter_types: Mapping[str, Any]
    request_types: Mapping[str, Any]
    session_types: Mapping[str, Any]
    labels: frozenset[str] | None = None


TYPED = (
    *("rid", "session_id", "extra_key", "cache_salt", "routing_key", "priority"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_sampling_mask", "return_routed_experts", "routed_experts_start_len"),
    *("custom_logit_processor", "lora_id", "bootstrap_host", "bootstrap_port"),
    *("bootstrap_room", "bootstrap_pair_key", "decode_tp_size", "routed_dp_rank"),
    *("multi_item_delimiter_indices", "token_indices_to_pool", "encoder_urls"),
)
"""Fields of a request with the type of the same field of a tokenized request."""


@cache
def limits(
    vocabulary: int, config: VeriCacheConfig, labels: frozenset[str] | None = None
) -> Limits:
    """Return the limits of a server, with the field types of SGLang's annotations.

    Args:
        vocabulary: Rows of the model's embedding.
        config: The server's.
        labels: See ``Limits``.
    """
    from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    of_request = get_type_hints(TokenizedGenerateReqInput)
    return Limits(
        vocabulary,
        config,
        get_type_hints(SamplingParams),
        {name: of_request[name] for name in TYPED},
        get_type_hints(SessionParams),
        labels,
    )


def check_copies(sampling_params: Any) -> None:
    """Refuse an invalid ``n``, before the request is copied.

    Args:
        sampling_params: None, an object, or a list with an object for each prompt.

    Raises:
        ConfigError: ``n`` is not within 1 and ``MOST_COPIES``.
    """
    several = sampling_params if isinstance(sampling_params, list) else None
    for params in several if several is not None else [sampling_params or {}]:
        copies = params.get("n", 1)
        _require_type("n", copies, int)
        _require_between("n", copies, *PARAMETER_BOUNDS["n"])


def check_request(
    request: Any, input_ids: Sequence[int] | None, limits: Limits
) -> None:
    """Refuse a request that would crash SGLang's scheduler.

    Args:
        request: One ``GenerateReqInput``, not a batch.
        input_ids: Token ids of its prompt; None if the prompt is embeddings.
        limits: Limits of the server.

    Raises:
        ConfigError: A field has the wrong type or value; the message names it.
    """
    _check_tokens(request, input_ids, limits.vocabulary)
    for name, kind in limits.request_types.items():
        value = getattr(request, name, None)
        if value is not None:
            _require_type(name, value, kind)
            _require_between(name, value, *REQUEST_BOUNDS.get(name, _ANY))
    most = limits.vocabulary
    _require_between("top_logprobs_num", request.top_logprobs_num or 0, 0, most)
    if request.positional_embed_overrides is not None and not hasattr(
        request.positional_embed_overrides, "embeds"
    ):
        raise ConfigError("positional_embed_overrides cannot be sent over HTTP")
    _check_session(request.session_params or {}, limits.session_types)
    _check_labels(request.custom_labels or {}, limits.labels)
    if request.custom_logit_processor:
        _check_processor(request.custom_logit_processor)
    check_parameters(request.sampling_params or {}, limits)


def check_parameters(params: Mapping[str, Any], limits: Limits) -> None:
    """Refuse ``sampling_params`` that would crash SGLang's scheduler.

    Args:
        params: ``sampling_params`` of one request, as received.
        limits: Limits of the server.

    Raises:
        ConfigError: A field is unknown or has the wrong type or value.
    """
    for name, value in params.items():
        if name not in limits.parameter_types or name in INTERNAL:
            raise ConfigError(f"sampling_params has no field {quoted(name)}")
        if value is not None and name not in UNTYPED:
            _require_type(name, value, limits.parameter_types[name])
            _require_between(name, value, *PARAMETER_BOUNDS.get(name, _ANY))
    # Their ids are masked only if the request has a minimum output length.
    masked = bool(params.get("min_new_tokens"))
    most = limits.vocabulary - 1 if masked else math.inf
    _check_stop_tokens(params.get("stop_token_ids"), most)
    _check_bias(params.get("logit_bias"), limits.vocabulary)
    patterns = params.get("stop_regex") or []
    check_stop_patterns([patterns] if isinstance(patterns, str) else patterns)
    custom = params.get("custom_params")
    read_options(custom, limits.config)
    if custom and len(json.dumps(custom, default=str)) > MOST_CUSTOM_BYTES:
        raise ConfigError(f"custom_params is larger than {MOST_CUSTOM_BYTES} bytes")


def _check_tokens(request: Any, ids: Sequence[int] | None, vocabulary: int) -> None:
    if ids is None:
        return
    if not len(ids):
        if not request.session_params:
            raise ConfigError("input_ids (or the prompt) must not be empty")
        return
    for token in (min(ids), max(ids)):
        _require_between("input_ids", token, 0, vocabulary - 1)


def _check_session(params: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    for name, value in params.items():
        if name not in types:
            raise ConfigError(f"session_params has no field {quoted(name)}")
        _require_type(f"session_params.{name}", value, types[name])


def _check_labels(labels: Mapping[str, str], known: frozenset[str] | None) -> None:
    """Refuse labels that SGLang's metrics lack: updating a metric would raise."""
    unknown = [name for name in labels if known is not None and name not in known]
    if unknown:
        raise ConfigError(f"custom_labels has no label {quoted(unknown[0])}")


def _check_processor(text: str) -> None:
    """Refuse a malformed logit processor without unpickling (running) its code."""
    try:
        bytes.fromhex(json.loads(text)["callable"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"custom_logit_processor is none: {quoted(text)} ({type(error).__name__})"
        ) from error


def _check_stop_tokens(tokens: Any, most: float) -> None:
    if tokens is None:
        return
    _require_type("stop_token_ids", tokens, set[int | None])
    for token in tokens:
        if token is not None:
            _require_between("stop_token_ids", token, 0, most)


def _check_bias(bias: Any, vocabulary: int) -> None:
    if bias is None:
        return
    _require_type("logit_bias", bias, dict[str | int, float])
    for token, value in bias.items():
        try:
            number = int(token)
        except ValueError:
            number = -1
        if not 0 <= number < vocabulary:
            raise ConfigError(
                f"logit_bias must have tokens from 0 to {vocabulary - 1} as its names, "
                f"got {quoted(token)}"
            )
        _require_between("logit_bias", value, -MOST_BIAS, MOST_BIAS)


_ANY = (-math.inf, math.inf)


def _require_type(name: str, value: Any, kind: Any) -> None:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}, got {quoted(value)}") from None


def _require_between(name: str, value: Any, least: float, most: float) -> None:
    """Refuse a number outside its bounds; other types are checked elsewhere."""
    if isinstance(value, (int, float)) and not least <= value <= most:
        bounds = f"from {least} to {most}"
        if (least, most) == _ANY:
            bounds = "a number"
        raise ConfigError(f"{name} must be {bounds}, got {quoted(value)}")
