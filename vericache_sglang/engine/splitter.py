"""Splits a prefilled prompt's KV in two parts, on the device or to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.compression.budget import (
    Budget,
    budget_for,
    complement_indices,
    keep_indices,
)
from vericache_sglang.engine.row_edit import (
    allocate,
    free,
    leave_tree,
    own_lock_covers,
    relist,
)
from vericache_sglang.engine.state import Layout, Parts, RequestState
from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.parked import gathered
from vericache_sglang.memory.splitting import pick

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vericache_sglang.compression.base import QueryTail, Selector
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.engine.places import Places
    from vericache_sglang.memory.complement import Complement
    from vericache_sglang.memory.transfers import Transfer

Entries = tuple[torch.Tensor, torch.Tensor]


class Splitter:
    """Moves entries between a row's slots, fresh slots and the host.

    Slots the tree owns are never written: other rows may list them. Then the kept
    entries get slots of their own, and the tree keeps its full copy for as long as it
    is not evicted. Where no slot is free for a split to the host, the kept entries
    wait in host memory while our own lock on the tree is dropped, so device memory
    never exceeds the full KV.

    Args:
        config: Compressor budget and protected tokens.
        selector: Bound to the model.
        places: Pool, row table, host memory.
    """

    def __init__(
        self, config: VeriCacheConfig, selector: Selector, places: Places
    ) -> None:
        self._config = config
        self._selector = selector
        self._places = places
        self._geometry = places.geometry
        self._pool = places.pool
        self._host = places.host

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
        return budget if budget.dropped else None

    def ready(self, state: RequestState, queries: Mapping[int, QueryTail]) -> bool:
        """Say whether the selector has what it asks for."""
        return (
            state.parts is not None
            or not self._selector.needs.q_tail
            or len(queries) == self._geometry.layers
        )

    def to_host(
        self, state: RequestState, tree_cache: Any, queries: Mapping[int, QueryTail]
    ) -> Transfer | None:
        """Split the prompt of a plainly decoding request; the complement leaves.

        Args:
            state: A request whose row is whole and whose prefill was processed.
            tree_cache: SGLang's prefix cache.
            queries: Layer -> last queries of the prompt, where the selector asks.

        Returns:
            The copy to the host; None when device or host memory does not allow it
            now, and nothing changed.
        """
        req, budget = state.req, self._budget_of(state)
        if not self._host.fits_complement(budget.dropped, budget.kept):
            return None
        row = self._places.row(state)
        body = row[: budget.offered].to(torch.int64).clone()
        owned = req.kv.cache_protected_len
        target = body[: budget.kept] if owned == 0 else None
        if target is None:
            target = allocate(tree_cache, budget.kept)
        if target is None and not own_lock_covers(req, tree_cache, budget.kept):
            return None
        complement = self._host.open(state.rid, budget.dropped, budget.kept)
        waiting: list[Entries] = []
        transfer = self._places.transfers.save(
            self._dropped(state, body, complement, target, waiting, queries), complement
        )
        leave_tree(req, tree_cache)
        free(tree_cache, body[owned:] if owned else body[budget.kept :])
        if target is None:
            target = allocate(tree_cache, budget.kept)
            if target is None:
                raise InvariantError(f"{state.rid}: its own prompt's slots are taken")
            self._write_waiting(target, waiting)
        relist(row, req.kv, budget.offered, target)
        self._enter(state, budget, complement.kept, Layout.KEPT)
        return transfer

    def on_device(
        self, state: RequestState, tree_cache: Any, queries: Mapping[int, QueryTail]
    ) -> bool:
        """Split a prompt and leave both parts in the pool.

        Where the tree owns prompt slots, the kept entries are copied beside them;
        otherwise the prompt's own slots are permuted.

        Returns:
            False when there is no room for the copies; nothing changed.
        """
        req, budget = state.req, self._budget_of(state)
        row = self._places.row(state)
        body = row[: budget.offered].to(torch.int64).clone()
        beside = req.kv.cache_protected_len > 0
        target = allocate(tree_cache, budget.kept) if beside else body[: budget.kept]
        if target is None:
            return False
        chosen = torch.empty(
            self._geometry.layers,
            self._geometry.kv_heads,
            budget.kept,
            dtype=torch.int32,
        )
        for layer, keys, values, kept in self._chosen(state, body, budget, queries):
            chosen[layer].copy_(kept)
            self._places.put(layer, target, pick(keys, kept), pick(values, kept))
            if not beside:
                dropped = complement_indices(kept, budget.offered)
                self._places.put(
                    layer,
                    body[budget.kept :],
                    pick(keys, dropped),
                    pick(values, dropped),
                )
        if beside:
            relist(row, req.kv, budget.offered, torch.cat([body, target]))
        layout = Layout.BESIDE if beside else Layout.PERMUTED
        self._enter(state, budget, chosen, layout)
        return True

    def _budget_of(self, state: RequestState) -> Budget:
        budget = state.parts.budget if state.parts else self.budget(state.prompt)
        if budget is None:
            raise InvariantError(f"{state.rid} is too short to be split")
        return budget

    def _enter(
        self, state: RequestState, budget: Budget, kept: torch.Tensor, layout: Layout
    ) -> None:
        req = state.req
        state.parts = Parts(budget, kept, layout, not req.skip_radix_cache_insert)
        # The row no longer lists token i at place i: the tree must not key it.
        req.skip_radix_cache_insert = True
        self._selector.close(state.rid)

    def _chosen(
        self,
        state: RequestState,
        body: torch.Tensor,
        budget: Budget,
        queries: Mapping[int, QueryTail],
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (layer, keys [B, H, D], values, kept [H, n]); gathered copies.

        A prompt that was split before keeps what was chosen then.
        """
        known = state.parts.kept if state.parts else None
        if known is None:
            self._selector.open(state.rid)
        blocks = gathered(self._pool.k_buffer, self._pool.v_buffer, body)
        for layer, (keys, values) in enumerate(blocks):
            if known is not None:
                kept = known[layer].to(keys.device, torch.int64)
            else:
                scores = self._selector.scores(
                    state.rid,
                    layer,
                    keys.transpose(0, 1),
                    values.transpose(0, 1),
                    queries.get(layer),
                )
                kept = keep_indices(scores, budget)
            yield layer, keys, values, kept

    def _dropped(
        self,
        state: RequestState,
        body: torch.Tensor,
        complement: Complement,
        target: torch.Tensor | None,
        waiting: list[Entries],
        queries: Mapping[int, QueryTail],
    ) -> Iterator[Entries]:
        """Yield each layer's dropped entries; the kept ones go to ``target``.

        Without a target they are appended to ``waiting``, in host memory.
        """
        budget = self._budget_of(state)
        for layer, keys, values, kept in self._chosen(state, body, budget, queries):
            complement.kept[layer].copy_(kept)
            dropped = complement_indices(kept, budget.offered)
            yield pick(keys, dropped), pick(values, dropped)
            if target is None:
                waiting.append((pick(keys, kept).cpu(), pick(values, kept).cpu()))
            else:
                self._places.put(layer, target, pick(keys, kept), pick(values, kept))

    def _write_waiting(self, target: torch.Tensor, waiting: list[Entries]) -> None:
        for layer, (keys, values) in enumerate(waiting):
            self._places.put(layer, target, keys, values)
