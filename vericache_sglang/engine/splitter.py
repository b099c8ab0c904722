"""Splits a prefilled prompt's KV in two parts, and makes finished rows whole again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from vericache_sglang.compression.budget import (
    Budget,
    budget_for,
    complement_indices,
    keep_indices,
)
from vericache_sglang.engine.state import RequestState, TwoParts
from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.splitting import join_layer, split_layer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.compression.base import QueryTail, Selector
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.memory.complement import Complement, HostStore
    from vericache_sglang.memory.geometry import KVGeometry


class Splitter:
    """Moves entries between a row's slots, fresh slots and the host.

    A row before and after, T prompt tokens of which B fill whole pages, n kept::

        before  | B prompt slots, some or all owned by the tree | tail | decode |
        after   | n kept slots, all own                         | tail | decode |

    The tail (fewer tokens than a page) stays where it is, so page borders of the
    decode slots do not move: B - n is a multiple of the page size.

    Slots the tree owns are never written: other rows may list them. Then the kept
    entries get their own slots, and the tree keeps its full copy for as long as it is
    not evicted. Where no slot is free the kept entries wait in host memory while our
    own lock on the tree is dropped, so device memory never exceeds the full KV.

    Args:
        config: Compressor budget and protected tokens.
        geometry: Shapes of the pool.
        selector: Bound to the model.
        pool: The staged KV pool (``k_buffer`` and ``v_buffer`` per layer,
            [slots, H, D]); a complement must fit its staging region.
        req_to_token: The row table, [rows, width] int32.
        host: Where complements go.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        geometry: KVGeometry,
        selector: Selector,
        pool: Any,
        req_to_token: torch.Tensor,
        host: HostStore,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._selector = selector
        self._pool = pool
        self._table = req_to_token
        self._host = host
        self._staging_slots: int = pool.staging_tokens

    def budget(self, prompt: int) -> Budget | None:
        """Return the counts for a prompt of ``prompt`` tokens; None: do not split."""
        body = self._geometry.page_floor(prompt)
        if prompt < self._config.min_prompt or body == 0:
            return None
        page = self._geometry.page_size
        tail = prompt - body
        budget = budget_for(
            body,
            self._config.keep,
            self._config.sink_tokens,
            max(0, self._config.recent_tokens - tail),
            page * self._selector.needs.token_align,
        )
        if budget.dropped == 0 or budget.dropped > self._staging_slots:
            return None
        return budget

    def split(
        self,
        state: RequestState,
        tree_cache: Any,
        queries: Mapping[int, QueryTail],
    ) -> bool:
        """Split the prompt of a plainly decoding request whose prefill was processed.

        Args:
            state: The request; ``state.parts`` is set on success.
            tree_cache: SGLang's prefix cache.
            queries: Layer -> last queries of the prompt, where the selector asks.

        Returns:
            False when device or host memory does not allow it now, or queries the
            selector asks for were not seen; nothing changed.
        """
        req, budget = state.req, self.budget(state.prompt)
        if budget is None or not self._host.fits(budget.dropped):
            return False
        if self._selector.needs.q_tail and len(queries) < self._geometry.layers:
            return False
        row = self._table[req.kv.req_pool_idx]
        body = row[: budget.offered].to(torch.int64).clone()
        owned = req.kv.cache_protected_len
        target = body[: budget.kept] if owned == 0 else None
        if target is None:
            target = _allocate(tree_cache, budget.kept)
        if target is None and not _own_lock_covers(req, tree_cache, budget.kept):
            return False
        complement = self._host.open(req.rid, budget.dropped, budget.kept)
        self._selector.open(req.rid)
        waiting = self._move(req.rid, body, budget, complement, target, queries)
        if owned:
            tree_cache.unpin(req)
            req.last_node = None
        tree_cache.token_to_kv_pool_allocator.free(
            body[owned:] if owned else body[budget.kept :]
        )
        if target is None:
            target = _allocate(tree_cache, budget.kept)
            if target is None:
                raise InvariantError(f"{req.rid}: slots of its own prompt are not free")
            self._write(target, waiting)
        _relist(row, req.kv, budget.offered, target)
        req.kv.cache_protected_len = 0
        state.parts = TwoParts(budget, complement, not req.skip_radix_cache_insert)
        # The row no longer lists token i at place i: the tree must not key it.
        req.skip_radix_cache_insert = True
        return True

    def join(self, state: RequestState, tree_cache: Any) -> bool:
        """Make a finished request's row list every token again, for the prefix tree.

        Args:
            state: A split request; its parts stay as they are.
            tree_cache: SGLang's prefix cache.

        Returns:
            False when the row stays split: no prefix cache, the user asked for no
            insertion, or no room. The scheduler then releases the row uncached.
        """
        req, parts = state.req, state.parts
        if parts is None or tree_cache.disable or not parts.insertable:
            return False
        budget = parts.budget
        row = self._table[req.kv.req_pool_idx]
        kept = row[: budget.kept].to(torch.int64).clone()
        cached = self._cached_prefix(req, budget.offered, tree_cache)
        if cached is not None:
            tree_cache.token_to_kv_pool_allocator.free(kept)
            whole = cached
        else:
            fresh = _allocate(tree_cache, budget.dropped)
            if fresh is None:
                return False
            whole = torch.cat([kept, fresh])
            self._restore(kept, whole, parts.complement)
        _relist(row, req.kv, budget.kept, whole)
        req.kv.cache_protected_len = budget.offered if cached is not None else 0
        req.skip_radix_cache_insert = False
        return True

    def _move(
        self,
        rid: str,
        body: torch.Tensor,
        budget: Budget,
        complement: Complement,
        target: torch.Tensor | None,
        queries: Mapping[int, QueryTail],
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Split layer by layer into ``target``; into host memory where it is None."""
        waiting = []
        buffers = zip(self._pool.k_buffer, self._pool.v_buffer, strict=True)
        for layer, (k_buffer, v_buffer) in enumerate(buffers):
            keys, values = k_buffer[body], v_buffer[body]
            scores = self._selector.scores(
                rid,
                layer,
                keys.transpose(0, 1),
                values.transpose(0, 1),
                queries.get(layer),
            )
            kept = keep_indices(scores, budget)
            dropped = complement_indices(kept, budget.offered)
            entries = split_layer(keys, values, kept, dropped, complement, layer)
            if target is None:
                waiting.append((entries[0].cpu(), entries[1].cpu()))
            else:
                k_buffer[target], v_buffer[target] = entries
        return waiting

    def _write(
        self, target: torch.Tensor, waiting: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        buffers = zip(self._pool.k_buffer, self._pool.v_buffer, strict=True)
        for (k_buffer, v_buffer), (keys, values) in zip(buffers, waiting, strict=True):
            k_buffer[target] = keys.to(k_buffer.device)
            v_buffer[target] = values.to(v_buffer.device)

    def _restore(
        self, kept_slots: torch.Tensor, whole: torch.Tensor, complement: Complement
    ) -> None:
        buffers = zip(self._pool.k_buffer, self._pool.v_buffer, strict=True)
        for layer, (k_buffer, v_buffer) in enumerate(buffers):
            complement.verify(layer)
            kept = complement.kept[layer].to(kept_slots.device, torch.int64)
            for buffer, host in (
                (k_buffer, complement.keys[layer]),
                (v_buffer, complement.values[layer]),
            ):
                buffer[whole] = join_layer(
                    buffer[kept_slots], kept, host.to(buffer.device)
                )

    def _cached_prefix(
        self, req: Any, length: int, tree_cache: Any
    ) -> torch.Tensor | None:
        """Return the tree's slots of the first ``length`` tokens if it has them all."""
        key = RadixKey(
            (req.origin_input_ids + req.output_ids)[:length],
            req.extra_key,
            cache_salt=req.cache_salt,
        )
        match = tree_cache.match_prefix(MatchPrefixParams(key=key))
        slots: torch.Tensor = match.device_indices
        return slots.to(torch.int64) if len(slots) >= length else None


def _allocate(tree_cache: Any, slots: int) -> torch.Tensor | None:
    """Take ``slots`` slots, a multiple of the page size, evicting unlocked prefixes.

    Returns None, and evicts nothing, when even all of them would not make room.
    """
    allocator = tree_cache.token_to_kv_pool_allocator
    if allocator.available_size() + tree_cache.evictable_size() < slots:
        return None
    evict_from_tree_cache(tree_cache, slots)
    taken: torch.Tensor | None = allocator.alloc(slots)
    return taken


def _own_lock_covers(req: Any, tree_cache: Any, slots: int) -> bool:
    """Say whether dropping this request's lock makes room for ``slots`` slots."""
    node = req.last_node
    tree_cache.unpin(req)
    room = (
        tree_cache.token_to_kv_pool_allocator.available_size()
        + tree_cache.evictable_size()
    )
    req.lock_receipt = tree_cache.inc_lock_ref(node).to_dec_params()
    return bool(room >= slots)


def _relist(row: torch.Tensor, kv: Any, old: int, head: torch.Tensor) -> None:
    """Replace the first ``old`` slots of a row by ``head`` and shift what follows."""
    rest = row[old : kv.kv_allocated_len].clone()
    row[: len(head)] = head.to(row.dtype)
    row[len(head) : len(head) + len(rest)] = rest
    kv.kv_committed_len += len(head) - old
    kv.kv_allocated_len += len(head) - old
