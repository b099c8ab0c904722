"""Where the two parts of every request are: device slots, staging slots, host bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vericache_sglang.compression.base import ModelSpec
from vericache_sglang.compression.catalog import create_selector
from vericache_sglang.engine.counters import Counters
from vericache_sglang.engine.query_tails import QueryTails
from vericache_sglang.engine.reloads import Reloads
from vericache_sglang.engine.splitter import Splitter
from vericache_sglang.memory.complement import HostStore
from vericache_sglang.memory.geometry import KVGeometry
from vericache_sglang.memory.ledger import Account, Ledger
from vericache_sglang.memory.staging import StagingRegion
from vericache_sglang.memory.transfers import (
    GIB,
    StreamTransfers,
    ThreadTransfers,
    Transfers,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.engine.state import RequestState


class Residence:
    """Owns every resource VeriCache takes, and books it.

    Args:
        config: Frozen settings.
        req_to_token_pool: SGLang's row pool; its table is replaced by a wider one.
        allocator: SGLang's slot allocator over a pool with a staging region.
        query_heads: Query heads on this rank.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        req_to_token_pool: Any,
        allocator: Any,
        query_heads: int,
    ) -> None:
        pool = allocator.get_kvcache()
        page = allocator.page_size
        self.counters = Counters()
        self.geometry = KVGeometry(
            layers=pool.layer_num,
            kv_heads=pool.head_num,
            head_dim=pool.head_dim,
            v_head_dim=pool.v_head_dim,
            element_bytes=pool.store_dtype.itemsize,
            page_size=page,
        )
        first_shadow = req_to_token_pool.req_to_token.shape[0]
        self.table = _widen(req_to_token_pool, config, page)
        self.shadow_rows = range(first_shadow, self.table.shape[0])
        self.ledger = Ledger()
        self.host = HostStore(
            self.geometry, pool.store_dtype, int(config.host_gb * GIB)
        )
        selector = create_selector(config.compressor, config.seed)
        selector.bind(
            ModelSpec(
                layers=pool.layer_num,
                query_heads=query_heads,
                kv_heads=pool.head_num,
                head_dim=pool.head_dim,
            )
        )
        self._selector = selector
        self.query_tails = QueryTails(selector.needs.q_tail)
        self.splitter = Splitter(
            config,
            self.geometry,
            selector,
            pool,
            self.table,
            self.host,
        )
        self.reloads = Reloads(
            StagingRegion(pool.staging_start, pool.staging_tokens),
            _transfers(pool, config.link_gbps),
            self.ledger,
            self.counters,
            self.geometry.token_bytes,
        )

    def split(self, state: RequestState, tree_cache: Any) -> bool:
        """Split a request's prompt; see ``Splitter.split``."""
        rid: str = state.req.rid
        queries = self.query_tails.of(rid)
        if not self.splitter.split(state, tree_cache, queries) or state.parts is None:
            self.counters.split_refusals += 1
            return False
        parts = state.parts
        self.query_tails.forget(rid)
        self.ledger.take(Account.KEPT_SLOTS, rid, parts.budget.kept)
        self.ledger.take(Account.HOST_BYTES, rid, parts.complement.nbytes)
        self.counters.splits += 1
        self.counters.offloaded_bytes += (
            parts.budget.dropped * self.geometry.token_bytes
        )
        return True

    def join(self, state: RequestState, tree_cache: Any) -> None:
        """Make a finished row whole for the prefix tree; see ``Splitter.join``."""
        self.counters.joins += self.splitter.join(state, tree_cache)

    def release(self, state: RequestState) -> None:
        """Give back all a request holds; its row itself is SGLang's to free."""
        if state.parts is None:
            return
        rid: str = state.req.rid
        self.reloads.end(state)
        self.host.drop(rid)
        self._selector.close(rid)
        self.ledger.give(Account.HOST_BYTES, rid)
        self.ledger.give(Account.KEPT_SLOTS, rid)

    def check(self, living: Collection[str]) -> None:
        """Balance the ledger against the region and the host store.

        Raises:
            InvariantError: It does not balance.
        """
        self.ledger.check(living, self.reloads.region.used, self.host.used_bytes)

    def report(self) -> dict[str, int | float]:
        """Return counters and current holdings."""
        held = {account.value: self.ledger.total(account) for account in Account}
        return {
            **self.counters.report(),
            **held,
            "query_tails": len(self.query_tails),
            "staging_tokens": self.reloads.region.slots,
        }


def _widen(pool: Any, config: VeriCacheConfig, page: int) -> torch.Tensor:
    """Give SGLang's row table shadow rows and room for drafts past the context end."""
    old: torch.Tensor = pool.req_to_token
    # Twice the round (SGLang reserves two, allocation_sizing.py) and a page to round.
    extra = 2 * (config.draft_length + 1) + page
    wide = old.new_zeros(old.shape[0] + config.max_verifies, old.shape[1] + extra)
    wide[: old.shape[0], : old.shape[1]] = old
    pool.req_to_token = wide
    return wide


def _transfers(pool: Any, link_gbps: float) -> Transfers:
    if pool.k_buffer[0].device.type == "cuda":
        return StreamTransfers(pool.k_buffer, pool.v_buffer)
    return ThreadTransfers(pool.k_buffer, pool.v_buffer, link_gbps)
