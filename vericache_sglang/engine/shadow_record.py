"""A finished request as its shadow check needs it, and the comparison with it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.engine.figures import KEY

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a client was sent, and all that is needed to ask for it again.

    Attributes:
        rid: The client's request.
        prompt: Prompt token ids.
        output: Output token ids, the stop token included.
        finish: The finish reason as the client saw it.
        params: A copy of its ``SamplingParams``, with drafting switched off.
        lora_id: Its adapter, or None.
        custom_logit_processor: Its serialized processor, or None.
        require_reasoning: As it was asked for.
        ipc: The tokenizer process it came from, or None where there is one.
    """

    rid: str
    prompt: Sequence[int]
    output: Sequence[int]
    finish: dict[str, Any]
    params: Any
    lora_id: str | None = None
    custom_logit_processor: str | None = None
    require_reasoning: bool = False
    ipc: str | None = None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first place where two answers differ.

    Attributes:
        position: Index of the first differing output token; the length of the output
            if only the finish reasons differ.
        served: Token sent to the client there, None past its end.
        full: Token plain decoding gives there, None past its end.
        margin: How far apart the two best logits of plain decoding were there; None
            past its end.
    """

    position: int
    served: int | None
    full: int | None
    margin: float | None


def repeatable(req: Any) -> bool:
    """Say whether a finished request was drafted for and can be checked.

    Only greedy answers are reproducible. Left out is what was aborted and what had
    more input than tokens: a session, an image, embeddings.

    Args:
        req: SGLang's ``Req``.
    """
    figures = (req.customized_info or {}).get(KEY)
    greedy = req.sampling_params.top_k == 1
    if not greedy or figures is None or not figures.rounds:
        return False
    inputs = (
        *(req.session, req.session_id, req.beam_group, req.multimodal_inputs),
        *(req.input_embeds, req.positional_embed_overrides, req.token_type_ids),
    )
    tokens_only = all(each is None for each in inputs)
    return tokens_only and not was_aborted(req)


def was_aborted(req: Any) -> bool:
    """Say whether a finished request ended by an abort."""
    aborted: bool = req.finished_reason.to_json()["type"] == "abort"
    return aborted


def served_from(req: Any) -> Served:
    """Copy what is needed of a finished request.

    Args:
        req: SGLang's ``Req``, ``repeatable``.
    """
    params = copy.copy(req.sampling_params)
    custom = dict(params.custom_params or {})
    custom.pop("__req__", None)  # SGLang's own back reference
    params.custom_params = {**custom, KEY: {"enabled": False}}
    return Served(
        rid=req.rid,
        prompt=req.origin_input_ids[:],
        output=req.output_ids_through_stop[:],
        finish=req.finished_reason.to_json(),
        params=params,
        lora_id=req.lora_id,
        custom_logit_processor=req.custom_logit_processor,
        require_reasoning=req.require_reasoning,
        ipc=req.http_worker_ipc,
    )


def compare(
    served: Served,
    output: Sequence[int],
    finish: dict[str, Any],
    top: Sequence[Sequence[float]],
) -> Mismatch | None:
    """Compare an answer with its plain repetition.

    Args:
        served: What the client was sent.
        output: Output token ids of the repetition.
        finish: Its finish reason.
        top: For each token of ``output``, its two best log-probabilities, best first.

    Returns:
        The first difference, or None if tokens and finish reason are the same.
    """
    both = zip(served.output, output, strict=False)
    same = min(len(served.output), len(output))
    position = next((i for i, (ours, full) in enumerate(both) if ours != full), same)
    if position == len(served.output) == len(output) and finish == served.finish:
        return None
    margin = None
    if position < len(output):
        best, second = top[position][:2]
        margin = best - second
    return Mismatch(
        position,
        served.output[position] if position < len(served.output) else None,
        output[position] if position < len(output) else None,
        margin,
    )
