"""SGLang's slot bookkeeping in torch, for its Triton kernels."""

from __future__ import annotations

import torch


def get_last_loc(*rows: torch.Tensor) -> torch.Tensor:
    """Return [B] last slots of the rows' prefixes, -1 for an empty prefix."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*rows)  # type: ignore[no-any-return]


def assign_req_to_token_pool_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write slots ``out_cache_loc`` to entries [start, end) of each row, in order."""
    lengths = (end_offset - start_offset).long()
    before = lengths.cumsum(0) - lengths
    rows = req_pool_indices.long().repeat_interleave(lengths)
    offset = (start_offset - before).repeat_interleave(lengths)
    slots = out_cache_loc[: len(rows)].to(req_to_token.dtype)
    req_to_token[rows, torch.arange(len(rows)) + offset] = slots
