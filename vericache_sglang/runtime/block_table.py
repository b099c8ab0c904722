"""SGLang's block table, allocated with extra rows for drafts and verifications."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from vericache_sglang.compression.catalog import create_compressor
from vericache_sglang.planning.block_table import BlockTableShape, block_table_shape
from vericache_sglang.runtime.algorithm import served_config

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vericache_sglang.compression.compressor import Compressor
    from vericache_sglang.config.schema import VeriCacheConfig


class BlockTablePool(ReqToTokenPool):
    """SGLang's pool of block-table rows, followed by VeriCache's rows.

    The table is allocated at full size, because SGLang builds views of it early
    (``KVIndexTranslator``). ``size`` and ``max_context_len`` keep the values SGLang
    asked for, so admission and leak checks do not see the extra rows and columns.

    Args:
        shape: Total rows and columns.
        max_context_len: Columns SGLang asked for, in KV slots.
        device: Where the table is.
        enable_memory_saver: As in ``ReqToTokenPool``.
        arriving: Rows, among those of ``shape.requests``, for requests whose KV is
            arriving from a prefill server (``DecodeReqToTokenPool``).

    Attributes:
        shape: Total rows and columns.
        on_arrival: Called with a batch of requests whose KV has arrived, and their last
            tokens [n] int64. Set by the worker.
        on_free: Called with the request whose row was freed because it finished, was
            aborted or was retracted. Set by the worker.
        segments: Cached prompt segments, for the radix cache (``TieredCache``). Set by
            the worker.
    """

    def __init__(
        self,
        shape: BlockTableShape,
        max_context_len: int,
        device: str,
        enable_memory_saver: bool,
        arriving: int = 0,
    ) -> None:
        # SGLang's pool adds the padding row itself.
        super().__init__(shape.rows - 1, shape.width, device, enable_memory_saver)
        self.shape = shape
        self.size, self._alloc_size = shape.requests - arriving, shape.requests + 1
        self.pre_alloc_size = arriving
        self.max_context_len = max_context_len
        self.clear()
        self.on_arrival: Callable[[Any, torch.Tensor], None] | None = None
        self.on_free: Callable[[Any], None] | None = None
        self.segments: Any = None

    def free(self, req: Any) -> None:
        """Free a request's row and report it."""
        super().free(req)
        if self.on_free is not None:
            self.on_free(req)


def block_table_pool(
    requests: int, max_context_len: int, *, arriving: int = 0, **options: Any
) -> Any:
    """Build the pool for ``KVCacheConfigurator``; None if VeriCache is off.

    Args:
        requests: Maximum running requests.
        max_context_len: Columns SGLang asks for, in KV slots.
        arriving: Maximum requests beyond these whose KV is arriving.
        options: ``device`` and ``enable_memory_saver``.
    """
    from sglang.srt.runtime_context import get_schedule

    config = served_config()
    if config is None:
        return None
    rows, page = requests + arriving, get_schedule().page_size
    shape = block_table_shape(config, rows, max_context_len, page, most_kept(config))
    return BlockTablePool(shape, max_context_len, arriving=arriving, **options)


def most_kept(config: VeriCacheConfig) -> float:
    """Return the largest draft KV as a fraction of the prompt's KV slots."""
    compressor: Compressor = create_compressor(config.compressor, config.seed)
    fixed = compressor.selector is not None and compressor.selector.follows_keep
    return config.keep if fixed and compressor.codec is None else 1.0
