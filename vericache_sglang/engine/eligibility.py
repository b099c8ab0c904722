"""Which requests may be drafted for; the others are decoded plainly, exactly."""

from __future__ import annotations

from typing import Any


def draftable(req: Any) -> bool:
    """Say whether greedy drafting and verification serve this request exactly.

    Everything that makes the next token more than the argmax of the logits, or that
    reads more than tokens from a decode step, is decoded plainly by SGLang's sampler.

    Args:
        req: SGLang's ``Req``.
    """
    params = req.sampling_params
    plain_argmax = (
        params.top_k <= 1  # SGLang spells temperature 0 as top_k 1
        and req.grammar is None
        and params.logit_bias is None
        and not params.frequency_penalty
        and not params.presence_penalty
        and params.repetition_penalty in (None, 1.0)
        and not params.min_new_tokens
        and req.custom_logit_processor is None
    )
    tokens_only = not (
        req.return_logprob or req.return_hidden_states or req.return_sampling_mask
    )
    # A session keeps the row for its next turn, in prompt order; beams share rows.
    own_row = req.session is None and req.beam_group is None
    return plain_argmax and tokens_only and own_row and not req.require_reasoning


def stop_tokens(req: Any) -> frozenset[int]:
    """Return the token ids that end the request, as ``Req`` checks them."""
    if req.sampling_params.ignore_eos:
        return frozenset()
    stops = set(req.sampling_params.stop_token_ids or ())
    stops.update(req.eos_token_ids or ())
    if req.tokenizer is not None:
        stops.add(req.tokenizer.eos_token_id)
        stops.update(req.tokenizer.additional_stop_token_ids or ())
    return frozenset(stops)
