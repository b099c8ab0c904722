"""Requests that go on from tokens that another server has decoded.

The KV of all but the last of these tokens is prefilled, and the last one takes the
place of the token that the prefill samples: SGLang's prefill samples with noise of its
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.runtime.request_logprobs import (
    put_logprobs,
    take_last_logprobs,
    tell_no_prompt,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

    from vericache_sglang.remote.messages import Logprobs


def know_next(req: Req, token: int, logprobs: Logprobs | None = None) -> None:
    """Set the next output token of a request that was not prefilled yet.

    Args:
        logprobs: Its log-probabilities; None: those of the sampled token stay.
    """
    req.vericache_known = (len(req.output_ids), token, logprobs)


def take_back(req: Req) -> None:
    """Have a request's last output token put in the place of what a prefill samples."""
    if req.grammar is not None:
        req.grammar.rollback(1)
    know_next(req, req.output_ids.pop(), take_last_logprobs(req))


def put_known(batch: ScheduleBatch, result: GenerationBatchResult) -> None:
    """Replace sampled tokens by known ones.

    Args:
        batch: A prefill.
        result: Its result, changed in place.
    """
    for i, req in enumerate(batch.reqs):
        if req.return_logprob and req.output_ids:
            tell_no_prompt(req)
        position, token, logprobs = getattr(req, "vericache_known", (-1, 0, None))
        if position == len(req.output_ids):
            result.next_token_ids[i].fill_(token)
            if logprobs is not None:
                put_logprobs(result.logits_output, i, logprobs)
