"""Decides which requests may draft; the others decode autoregressively."""

from __future__ import annotations

from typing import Any

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
