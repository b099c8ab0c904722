"""The kinds of model that VeriCache refuses, and why.

Supported are decoder-only models in which every layer attends to all earlier tokens,
with one K and one V per token and KV head, and positions inside K or the hidden state.
"""

from __future__ import annotations

from typing import Any

from vericache_sglang.serving.rule import Rule

_OTHER_MODEL = "serve a decoder-only model with full attention"

_KNOWN_LAYERS = frozenset(
    ("full_attention", "attention", "sliding_attention", "chunked_attention")
)

_RECURRENT_MARKS = (
    "attn_layer_period",
    "hybrid_override_pattern",
    "linear_attn_config",
    "mamba_d_state",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
)
"""Fields that only configs of Mamba-like and hybrid models have."""

_ALIBI_ARCHITECTURES = frozenset({"BloomForCausalLM", "MPTForCausalLM"})
"""Models that use ALiBi although no field of their config says so."""


def _text(model: Any, name: str) -> Any:
    return getattr(model.hf_text_config, name, None)


def _fields(value: Any) -> dict[str, Any]:
    """Return a nested config's fields, whether it is a dict or an object."""
    return value if isinstance(value, dict) else vars(value) if value else {}


def _has_window(model: Any) -> bool:
    if model.is_hybrid_swa or model.is_local_attention_model:
        return True
    # A sliding window no shorter than the context is full attention (e.g. Phi-3).
    sizes = (model.sliding_window_size, model.attention_chunk_size)
    return any(size and size <= model.context_len for size in sizes)


def _is_recurrent(model: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import hybrid_lightning_config, mambaish_config

    kinds = {*(_text(model, "layer_types") or ())}
    kinds |= {*(_text(model, "layers_block_type") or ())}
    return (
        model.attention_arch.name == "SSM"
        or mambaish_config(model) is not None
        or hybrid_lightning_config(model) is not None
        or any(_text(model, mark) for mark in _RECURRENT_MARKS)
        or bool(kinds - _KNOWN_LAYERS)
    )


def _has_alibi(model: Any) -> bool:
    return bool(
        _ALIBI_ARCHITECTURES & {*(model.hf_config.architectures or ())}
        or getattr(model, "use_alibi", False)
        or _text(model, "alibi")
        or _fields(_text(model, "attn_config")).get("alibi")
    )


def _has_quantized_kv(model: Any) -> bool:
    scheme = _fields(getattr(model.hf_config, "quantization_config", None))
    return bool(scheme.get("kv_cache_quant_algo") or scheme.get("kv_cache_scheme"))


def _is_sparse(model: Any) -> bool:
    from sglang.srt.configs.model_config import is_minimax_sparse

    return is_minimax_sparse(model.hf_config) or bool(
        _text(model, "dual_chunk_attention_config")
    )


MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "not generating",
        lambda model: not model.is_generation,
        "there is nothing to draft for embeddings and rewards",
        "serve a model that generates",
    ),
    Rule(
        "encoder-decoder",
        lambda model: bool(model.is_encoder_decoder),
        "a block-table row lists the encoder's slots too, ahead of the prompt's",
        _OTHER_MODEL,
    ),
    Rule(
        "recurrent or linear attention layers",
        _is_recurrent,
        "their state is one per request and cannot step back over rejected drafts",
        _OTHER_MODEL,
    ),
    Rule(
        "multi-head latent attention (MLA)",
        lambda model: bool(model.attention_arch.name == "MLA"),
        "all heads share one latent per token, so heads cannot keep different tokens",
        _OTHER_MODEL,
    ),
    Rule(
        "sliding-window attention",
        _has_window,
        "a window is counted in slots of the row, which are not tokens here",
        "limit --context-length to less than the window, or serve another model",
    ),
    Rule(
        "learned attention sinks",
        lambda model: bool(model.has_attention_sinks),
        "the sink's share of a shortened row is untested",
        _OTHER_MODEL,
    ),
    Rule(
        "sparse attention",
        _is_sparse,
        "the model selects tokens by their place in the row",
        _OTHER_MODEL,
    ),
    Rule(
        "ALiBi positions",
        _has_alibi,
        "the distance of two tokens is taken from their places in the row",
        "serve a model with rotary or absolute positions",
    ),
    Rule(
        "multi-axis rotary positions (M-RoPE)",
        lambda model: bool(model.model_is_mrope),
        "positions are rebuilt from the number of slots",
        "serve a text model",
    ),
    Rule(
        "n-gram embeddings",
        lambda model: bool(model.use_ngram_embedding or model.use_engram),
        "a token's embedding depends on the tokens drafted before it",
        _OTHER_MODEL,
    ),
    Rule(
        "quantized KV in the checkpoint",
        _has_quantized_kv,
        "KV stored in another type than the model's is untested",
        "serve a checkpoint without kv_cache_scheme",
    ),
)
