"""The small models and heads that are refused as inner drafters, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vericache_sglang.planning.models import aux_states, stored_names
from vericache_sglang.runtime.device_memory import model_folder
from vericache_sglang.runtime.planned_memory import DRAFT_MODEL
from vericache_sglang.serving.refused_models import MODEL_RULES
from vericache_sglang.serving.rule import Rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_sglang.config.schema import VeriCacheConfig

_OTHER = "name a small decoder-only model with the served model's vocabulary"
_HEAD = "name an EAGLE3 head that was trained for the served model"
_NO_HEAD = "use --vericache-inner model or ngram"
_WITH_WEIGHTS = "--vericache-inner {0.config.inner}"

EAGLE3 = "LlamaForCausalLMEagle3"
"""SGLang's class of the EAGLE3 heads that are served."""

PREDICTORS = frozenset(
    (
        "MiMoMTP",
        "Glm4MoeForCausalLMNextN",
        "Ernie4_5_MoeForCausalLMMTP",
        "Qwen3MoeForCausalLMMTP",
    )
)
"""SGLang's classes of the prediction heads that are served."""


class Drafting(NamedTuple):
    """The flags of a server that concern its inner drafter.

    Attributes:
        config: Settings of VeriCache.
        args: SGLang's ``ServerArgs``.
    """

    config: VeriCacheConfig
    args: Any

    @property
    def weighted(self) -> bool:
        """Whether the inner drafter has weights."""
        return self.config.inner_weights


class DraftPair(NamedTuple):
    """A served model and the small model or head that proposes for it.

    Attributes:
        config: Settings of VeriCache.
        served: SGLang's ``ModelConfig`` of the served model.
        draft: That of the small model or head.
    """

    config: VeriCacheConfig
    served: Any
    draft: Any

    @property
    def least(self) -> int:
        """Shortest context that serves the window, in tokens."""
        return self.config.ring_reach

    @property
    def architecture(self) -> str:
        """SGLang's class of the drafter."""
        return str((self.draft.hf_config.architectures or ["none"])[0])

    @property
    def target(self) -> str:
        """SGLang's class of the served model."""
        return str((self.served.hf_config.architectures or ["none"])[0])

    @property
    def reads(self) -> int:
        """Numbers per hidden state that a head reads."""
        head = self.draft.hf_config
        size: int = getattr(head, "target_hidden_size", None) or head.hidden_size
        return size

    @property
    def layers(self) -> list[int]:
        """Layers whose outputs a head reads."""
        eagle = getattr(self.draft.hf_config, "eagle_config", None) or {}
        count = self.served.num_hidden_layers
        chosen = [1, count // 2 - 1, count - 4]  # of set_eagle3_layers_to_capture
        return list(eagle.get("eagle_aux_hidden_state_layer_ids") or chosen)

    @property
    def predicts(self) -> int:
        """Prediction layers of the checkpoint."""
        return int(self.draft.num_nextn_predict_layers or 0)

    @property
    def states(self) -> int:
        """Hidden states that a head reads of a token."""
        return aux_states(vars(self.draft.hf_config))


def _is_unknown(pair: DraftPair) -> bool:
    from sglang.srt.models.registry import ModelRegistry

    return pair.architecture not in ModelRegistry.get_supported_archs()


def _is_head(pair: DraftPair) -> bool:
    return any(mark in pair.architecture for mark in ("MTP", "NextN", "Eagle"))


def _has_no_setter(pair: DraftPair) -> bool:
    from sglang.srt.models.registry import ModelRegistry

    served, _ = ModelRegistry.resolve_model_cls([pair.target])
    return not (
        hasattr(served, "set_eagle3_layers_to_capture")
        and hasattr(served, "get_embed_and_head")
    )


def _reads_other_layers(pair: DraftPair) -> bool:
    # SGLang captures the input of the layer after, so never the last one's output.
    last = pair.served.num_hidden_layers - 1
    inside = all(0 <= layer < last for layer in pair.layers)
    return not inside or len({*pair.layers}) != pair.states


def _of_the_drafter(rule: Rule) -> Rule:
    return Rule(
        f"{DRAFT_MODEL} ({rule.what})",
        lambda pair: rule.broken(pair.draft),
        "its KV could not be kept in a ring",
        _OTHER,
    )


def _of_a_head(
    inner: str, broken: Callable[[DraftPair], bool], reason: str, remedy: str = _HEAD
) -> Rule:
    return Rule(
        DRAFT_MODEL if inner == "eagle3" else f"--vericache-inner {inner}",
        lambda pair: pair.config.inner == inner and broken(pair),
        reason,
        remedy,
    )


def _has_no_predictor(pair: DraftPair) -> bool:
    names = stored_names(model_folder(pair.draft.model_path, pair.draft.revision))
    # Unknown while the checkpoint is not on this machine.
    marks = ("mtp", "eh_proj")
    return bool(names) and not any(mark in name for name in names for mark in marks)


DRAFTING_RULES: tuple[Rule, ...] = (
    Rule(
        DRAFT_MODEL,
        lambda asked: asked.args.speculative_draft_model_path and not asked.weighted,
        "the served model drafts for itself",
        "leave it out, or use --vericache-inner model or eagle3",
    ),
    Rule(
        _WITH_WEIGHTS,
        lambda asked: asked.weighted and not asked.args.speculative_draft_model_path,
        "it needs the weights of a small model or head",
        f"give {DRAFT_MODEL}, or use --vericache-inner ngram",
    ),
    Rule(
        "--speculative-draft-window-size",
        lambda asked: (
            asked.weighted and asked.args.speculative_draft_window_size is not None
        ),
        "the drafter's window is VeriCache's",
        "use --vericache-inner-window",
    ),
    Rule(
        "--speculative-draft-attention-backend",
        lambda asked: (
            asked.weighted
            and asked.args.speculative_draft_attention_backend is not None
        ),
        "only VeriCache's backend reads a ring of slots",
        "leave it out",
    ),
)
"""Rules over ``Drafting``."""

PAIR_RULES: tuple[Rule, ...] = (
    *map(_of_the_drafter, MODEL_RULES),
    _of_a_head(
        "eagle3",
        lambda pair: pair.architecture != EAGLE3,
        "{0.architecture} is no EAGLE3 head in SGLang's format (EAGLE-1 and EAGLE-2 "
        "heads, multi-layer heads and checkpoints of other libraries are not served)",
        f"name a checkpoint whose architecture is {EAGLE3}",
    ),
    Rule(
        DRAFT_MODEL,
        lambda pair: not pair.config.inner_head and _is_unknown(pair),
        "SGLang does not serve this kind of model",
        _OTHER,
    ),
    Rule(
        DRAFT_MODEL,
        lambda pair: not pair.config.inner_head and _is_head(pair),
        "a head reads what its target computes",
        "use --vericache-inner eagle3 for an EAGLE3 head, mtp for the served model's "
        "own, or name a small model",
    ),
    _of_a_head(
        "eagle3",
        _has_no_setter,
        "SGLang's {0.target} does not return the hidden states of its layers",
        _NO_HEAD,
    ),
    _of_a_head(
        "eagle3",
        lambda pair: pair.reads != pair.served.hidden_size,
        "it reads hidden states of {0.reads} numbers, the served model's have "
        "{0.served.hidden_size}",
    ),
    _of_a_head(
        "eagle3",
        lambda pair: pair.draft.hidden_size != pair.served.hidden_size,
        "its hidden size is {0.draft.hidden_size}, that of the embeddings which it "
        "shares is {0.served.hidden_size}",
    ),
    _of_a_head(
        "eagle3",
        _reads_other_layers,
        "it reads {0.states} hidden states, of layers {0.layers}; the served model has "
        "{0.served.num_hidden_layers} layers, of which the last one's is not returned",
    ),
    _of_a_head(
        "eagle3",
        lambda pair: pair.draft.dtype != pair.served.dtype,
        "its type is {0.draft.dtype}, the served model's {0.served.dtype}",
        "give --dtype",
    ),
    _of_a_head(
        "mtp",
        lambda pair: pair.architecture not in PREDICTORS,
        "{0.target} has no prediction head that is served; models with MiMo's, "
        "GLM-4.5's, ERNIE 4.5's and Qwen3-MoE's have",
        _NO_HEAD,
    ),
    _of_a_head(
        "mtp",
        lambda pair: pair.architecture in PREDICTORS and pair.predicts != 1,
        "the checkpoint has {0.predicts} prediction layers, one is served",
        _NO_HEAD,
    ),
    _of_a_head(
        "mtp",
        lambda pair: pair.architecture in PREDICTORS and _has_no_predictor(pair),
        "the checkpoint has no weights of a prediction head",
        f"name one that has with {DRAFT_MODEL}, or use --vericache-inner ngram",
    ),
    _of_a_head(
        "mtp",
        lambda pair: pair.draft.hidden_size != pair.served.hidden_size,
        "its hidden size is {0.draft.hidden_size}, the served model's "
        "{0.served.hidden_size}",
        f"leave out {DRAFT_MODEL}",
    ),
    Rule(
        DRAFT_MODEL,
        lambda pair: pair.draft.vocab_size != pair.served.vocab_size,
        "its vocabulary has {0.draft.vocab_size} tokens, the served model's "
        "{0.served.vocab_size}",
        "name one of the same family",
    ),
    Rule(
        "--vericache-inner-window",
        lambda pair: pair.draft.context_len < pair.least,
        "with the drafts it takes {0.least} positions, the drafter has "
        "{0.draft.context_len}",
        "lower it",
    ),
)
"""Rules over ``DraftPair``."""
