"""SGLang's row table, made wide enough for draft parts and shadow rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vericache_sglang.compression.base import Selector

if TYPE_CHECKING:
    import torch

    from vericache_sglang.compression.compressor import Compressor
    from vericache_sglang.config.schema import VeriCacheConfig


def most_kept(config: VeriCacheConfig, compressor: Compressor) -> float:
    """Return the largest draft part, as a share of the prompt's slots."""
    selector = compressor.selector
    fixed = selector is not None and type(selector).keep_share is Selector.keep_share
    return config.keep if fixed and compressor.codec is None else 1.0


def widen(pool: Any, config: VeriCacheConfig, page: int, share: float) -> torch.Tensor:
    """Give SGLang's row table shadow rows, and its rows room for copies and drafts."""
    old: torch.Tensor = pool.req_to_token
    rows, width = old.shape
    # Twice the round (SGLang reserves two, allocation_sizing.py) and a page to round;
    # the draft part may be listed beside a whole prompt.
    extra = 2 * (config.draft_length + 1) + int(share * width) + 2 * page
    wide = old.new_zeros(2 * rows + config.max_verifies, width + extra)
    wide[:rows, :width] = old
    pool.req_to_token = wide
    return wide
