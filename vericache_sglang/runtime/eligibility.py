"""Decides which requests may draft; the others decode autoregressively."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.utils import is_health_check_generate_req

from vericache_sglang.observability.request_stats import KEY
from vericache_sglang.sampling.profile import rolls_back


def draftable(req: Any) -> bool:
    """Return whether drafting and verification are exact for this request.

    Excluded are requests that read more of a decode step than tokens and
    log-probabilities, sessions and beams, and grammars without rollback.

    Args:
        req: SGLang's ``Req``.
    """
    tokens_only = not (req.return_hidden_states or req.return_sampling_mask)
    # A session keeps its row in prompt order for the next turn; beams share rows.
    own_row = req.session is None and req.beam_group is None
    return tokens_only and own_row and rolls_back(req.grammar)


def travels(req: Any) -> bool:
    """Return whether a verifier may decode this request for a drafter.

    It decodes from tokens and sampling parameters alone, and after it is lost another
    one must go on from the tokens so far. So log-probabilities of a prompt stay,
    grammars that cannot roll back, and whatever else belongs to the request in this
    process.

    Args:
        req: SGLang's ``Req``, on its way to the waiting queue.
    """
    params = req.sampling_params
    custom = set(params.custom_params or ()) - {KEY, "__req__"}
    own = (
        *(req.lora_id, req.multimodal_inputs, req.input_embeds, req.session, custom),
        *(req.custom_logit_processor, req.positional_embed_overrides, req.beam_group),
        *(req.token_type_ids, req.extra_key, req.cache_salt, req.priority),
        *(req.require_reasoning, req.return_hidden_states),
        *(req.return_sampling_mask, req.return_routed_experts, req.return_indexer_topk),
        *(req.to_finish, req.finished_reason, req.output_ids),
    )
    # SGLang's own checks of health ask this server; a prefill alone has no tokens.
    here = is_health_check_generate_req(req) or params.max_new_tokens < 1
    first = req.logprob_start_len if req.return_logprob else -1
    of_prompt = 0 <= first < len(req.origin_input_ids)
    return not (any(own) or here or of_prompt) and rolls_back(req.grammar)


def stop_tokens(req: Any) -> frozenset[int]:
    """Return the token ids that end the request, as ``Req`` checks them."""
    if req.sampling_params.ignore_eos:
        return frozenset()
    return end_tokens(req)


def end_tokens(req: Any) -> frozenset[int]:
    """Return the token ids that end the request unless ``ignore_eos`` is set.

    ``min_new_tokens`` forbids these (``BatchedMinNewTokensPenalizer``).
    """
    stops = set(req.sampling_params.stop_token_ids or ())
    stops.update(req.eos_token_ids or ())
    if req.tokenizer is not None:
        stops.add(req.tokenizer.eos_token_id)
        stops.update(req.tokenizer.additional_stop_token_ids or ())
    return frozenset(stop for stop in stops if stop is not None)
