"""The small models that are refused as inner drafters, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vericache_sglang.drafters.model import least_context, ring_of
from vericache_sglang.runtime.planned_memory import DRAFT_MODEL
from vericache_sglang.serving.refused_models import MODEL_RULES
from vericache_sglang.serving.rule import Rule

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig

_OTHER = "name a small decoder-only model with the served model's vocabulary"


class Drafting(NamedTuple):
    """The flags of a server that concern its inner drafter.

    Attributes:
        config: Settings of VeriCache.
        args: SGLang's ``ServerArgs``.
    """

    config: VeriCacheConfig
    args: Any

    @property
    def by_model(self) -> bool:
        """Whether a small model proposes."""
        return self.config.inner == "model"


class DraftPair(NamedTuple):
    """A served model and the small model that proposes for it.

    Attributes:
        config: Settings of VeriCache.
        served: SGLang's ``ModelConfig`` of the served model.
        draft: That of the small model.
    """

    config: VeriCacheConfig
    served: Any
    draft: Any

    @property
    def least(self) -> int:
        """Shortest context that serves the window, in tokens."""
        return least_context(ring_of(self.config))


def _architecture(pair: DraftPair) -> str:
    return str((pair.draft.hf_config.architectures or ["none"])[0])


def _is_unknown(pair: DraftPair) -> bool:
    from sglang.srt.models.registry import ModelRegistry

    return _architecture(pair) not in ModelRegistry.get_supported_archs()


def _is_head(pair: DraftPair) -> bool:
    return any(mark in _architecture(pair) for mark in ("MTP", "NextN", "Eagle"))


def _of_the_small_model(rule: Rule) -> Rule:
    return Rule(
        f"{DRAFT_MODEL} ({rule.what})",
        lambda pair: rule.broken(pair.draft),
        "its KV could not be kept in a ring",
        _OTHER,
    )


DRAFTING_RULES: tuple[Rule, ...] = (
    Rule(
        DRAFT_MODEL,
        lambda asked: asked.args.speculative_draft_model_path and not asked.by_model,
        "the served model drafts for itself",
        "leave it out, or use --vericache-inner model",
    ),
    Rule(
        "--vericache-inner model",
        lambda asked: asked.by_model and not asked.args.speculative_draft_model_path,
        "it needs the weights of a small model",
        f"give {DRAFT_MODEL}, or use --vericache-inner ngram",
    ),
    Rule(
        "--tp-size",
        lambda asked: asked.by_model and asked.args.tp_size != 1,
        "an error of the small model on one rank would leave the others waiting",
        "use one rank, or --vericache-inner ngram",
    ),
    Rule(
        "--speculative-draft-window-size",
        lambda asked: (
            asked.by_model and asked.args.speculative_draft_window_size is not None
        ),
        "the window of a small model is VeriCache's",
        "use --vericache-inner-window",
    ),
    Rule(
        "--speculative-draft-attention-backend",
        lambda asked: (
            asked.by_model
            and asked.args.speculative_draft_attention_backend is not None
        ),
        "only VeriCache's backend reads a ring of slots",
        "leave it out",
    ),
)
"""Rules over ``Drafting``."""

PAIR_RULES: tuple[Rule, ...] = (
    *map(_of_the_small_model, MODEL_RULES),
    Rule(
        DRAFT_MODEL,
        _is_unknown,
        "SGLang does not serve this kind of model",
        _OTHER,
    ),
    Rule(
        DRAFT_MODEL,
        _is_head,
        "a head reads the hidden states of its target, which are not passed on",
        _OTHER,
    ),
    Rule(
        DRAFT_MODEL,
        lambda pair: pair.draft.vocab_size != pair.served.vocab_size,
        "its vocabulary has {0.draft.vocab_size} tokens, the served model's "
        "{0.served.vocab_size}",
        "name a model of the same family",
    ),
    Rule(
        "--vericache-inner-window",
        lambda pair: pair.draft.context_len < pair.least,
        "with the drafts it takes {0.least} positions, the small model has "
        "{0.draft.context_len}",
        "lower it",
    ),
)
"""Rules over ``DraftPair``."""
