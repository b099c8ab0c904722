"""Requests that go on from tokens that another server has decoded.

The KV of all but the last of these tokens is prefilled, and the last one takes the
place of the token that the prefill samples: SGLang's prefill samples with noise of its
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def know_next(req: Req, token: int) -> None:
    """Set the next output token of a request that was not prefilled yet."""
    req.vericache_known = (len(req.output_ids), token)


def take_back(req: Req) -> None:
    """Have a request's last output token put in the place of what a prefill samples."""
    if req.grammar is not None:
        req.grammar.rollback(1)
    know_next(req, req.output_ids.pop())


def put_known(batch: ScheduleBatch, sampled: torch.Tensor) -> None:
    """Replace sampled tokens by known ones.

    Args:
        batch: A prefill.
        sampled: Its [requests] tokens, changed in place.
    """
    for i, req in enumerate(batch.reqs):
        position, token = getattr(req, "vericache_known", (-1, 0))
        if position == len(req.output_ids):
            sampled[i].fill_(token)
