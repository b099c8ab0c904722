"""Compresses prefilled prompts into draft KV and residual KV, on device or host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.compression.budget import (
    Budget,
    budget_for,
    coded_rows,
)
from vericache_sglang.errors import InvariantError, LostKVError, TransferError
from vericache_sglang.kv.request import Layout, Parts, RequestState
from vericache_sglang.kv.row_edit import (
    allocate,
    free,
    leave_tree,
    own_lock_covers,
    relist,
)
from vericache_sglang.kv.selection import Chooser, Stretch
from vericache_sglang.kv.split_layers import dropped_by_layer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vericache_sglang.compression.base import Selector
    from vericache_sglang.compression.codecs.base import PartSpec
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.packed_drafts import Codes
    from vericache_sglang.kv.selection import Look
    from vericache_sglang.kv.transfers import Transfer


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Kept tokens of a prompt; int32, on the pool's device.

    Attributes:
        exact: [L, H, n] prompt positions kept exactly.
        coded: [L, H, coded] prompt positions kept packed.
    """

    exact: torch.Tensor
    coded: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DraftLayer:
    """One layer of draft KV: exact entries [n, H, D], and packed segments."""

    keys: torch.Tensor
    values: torch.Tensor
    packed: list[PartSpec]


class PromptCompressor:
    """Compresses prompts: moves KV between a row's slots, new slots and the host.

    Slots owned by the prefix tree are never written, because other rows may list
    them: the draft KV then gets slots of its own, and the tree keeps its full copy
    until it is evicted. Where no slot is free for a compression to the host, the
    draft KV waits in host memory while the request's own lock on the tree is
    dropped, so device memory never exceeds the full KV.

    Args:
        config: Compressor budget and protected tokens.
        selector: Bound to the model; None: every token is kept.
        codes: Packs kept tokens; None: nothing is packed.
        handles: Pool, block table, host memory.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        selector: Selector | None,
        codes: Codes | None,
        handles: KVHandles,
    ) -> None:
        self._config = config
        self._selector = selector
        self._chooser = None if selector is None else Chooser(selector, handles)
        self._codes = codes
        self._handles = handles
        self._geometry = handles.geometry
        self._pool = handles.pool
        self._host = handles.host

    def budget(self, prompt: int, share: float | None = None) -> Budget | None:
        """Return the counts for a prompt of ``prompt`` tokens; None: not compressed.

        Args:
            prompt: T, in tokens.
            share: Share of tokens the method asks to keep; None: as configured.
        """
        body = self._geometry.page_floor(prompt)
        if prompt < self._config.min_prompt or body == 0:
            return None
        align, keep = self._geometry.page_size, 1.0
        if self._selector is not None:
            align *= self._selector.needs.token_align
            keep = self._config.keep if share is None else share
        budget = budget_for(
            body,
            keep,
            self._config.sink_tokens,
            max(0, self._config.recent_tokens - (prompt - body)),
            align,
        )
        if self._codes is not None:
            budget = self._codes.complete(budget)
        return budget if budget.slots < budget.offered else None

    def to_host(
        self, state: RequestState, tree_cache: Any, budget: Budget, look: Look
    ) -> Transfer | None:
        """Compress a request that decodes autoregressively; residual KV to the host.

        Args:
            state: A request whose row lists the full KV and whose prefill was
                processed.
            tree_cache: SGLang's prefix cache.
            budget: Counts of its prompt.
            look: Observations of its prefill, by layer.

        Returns:
            The copy to the host; None, and nothing changed, where device or host
            memory is short now.

        Raises:
            TransferError: The copy could not be made; nothing changed.
            LostKVError: It failed after the prompt's own slots were overwritten.
        """
        req = state.req
        if not self._host.fits_residual(budget):
            return None
        row = self._handles.row(state)
        body = row[: budget.offered].to(torch.int64).clone()
        owned = req.kv.cache_protected_len
        target = body[: budget.slots] if owned == 0 else None
        if target is None:
            target = allocate(tree_cache, budget.slots)
        if target is None and not own_lock_covers(req, tree_cache, budget.slots):
            return None
        chosen = self._chosen(state, body, budget, look)
        waiting: list[DraftLayer] = []
        try:
            transfer = self._save(state, body, budget, chosen, target, waiting)
        except TransferError:
            if owned and target is not None:
                free(tree_cache, target)
            raise
        leave_tree(req, tree_cache)
        free(tree_cache, body[owned:] if owned else body[budget.slots :])
        if target is None:
            target = allocate(tree_cache, budget.slots)
            if target is None:
                raise InvariantError(f"{state.rid}: its own prompt's slots are taken")
            for layer, draft in enumerate(waiting):
                self._put(layer, target, budget, draft)
        relist(row, req.kv, budget.offered, target)
        self._enter(state, budget, chosen, Layout.KEPT)
        return transfer

    def _save(
        self,
        state: RequestState,
        body: torch.Tensor,
        budget: Budget,
        chosen: Chosen,
        target: torch.Tensor | None,
        waiting: list[DraftLayer],
    ) -> Transfer:
        """Copy the residual KV to the host and the draft KV to ``target``.

        Args:
            state: The request.
            body: [B] int64, slots of its prompt.
            budget: Counts of its prompt.
            chosen: Kept tokens.
            target: [c + n] int64, slots of the draft KV; None: there are none yet.
            waiting: Receives the draft KV by layer where ``target`` is None.

        Raises:
            TransferError: See ``to_host``.
        """
        residual = self._host.open(state.rid, budget)
        residual.describe(chosen.exact, chosen.coded)
        put = False

        def leaving() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            nonlocal put
            away = dropped_by_layer(chosen.exact, budget.offered)
            for layer, index in enumerate(away):
                draft = self._draft(layer, body, chosen)
                yield self._handles.pick(layer, body, index)
                if target is None:
                    waiting.append(draft)
                else:
                    self._put(layer, target, budget, draft)
                    put = True

        try:
            return self._handles.transfers.save(leaving(), residual)
        except TransferError as error:
            self._host.drop(state.rid)
            if put and not state.req.kv.cache_protected_len:  # in its own slots
                raise LostKVError(str(error)) from error
            raise

    def on_device(
        self, state: RequestState, tree_cache: Any, budget: Budget, look: Look
    ) -> bool:
        """Compress a prompt; draft KV and residual KV stay in the pool.

        Where the tree owns prompt slots, or tokens are packed, the draft KV gets slots
        beside them; otherwise the prompt's own slots are permuted.

        Returns:
            False where there is no room for the draft KV; nothing changed.
        """
        req = state.req
        row = self._handles.row(state)
        body = row[: budget.offered].to(torch.int64).clone()
        beside = req.kv.cache_protected_len > 0 or self._codes is not None
        target = allocate(tree_cache, budget.slots) if beside else body[: budget.slots]
        if target is None:
            return False
        chosen = self._chosen(state, body, budget, look)
        away = dropped_by_layer(chosen.exact, budget.offered)
        for layer in range(self._geometry.layers):
            draft = self._draft(layer, body, chosen)
            rest = None if beside else self._handles.pick(layer, body, next(away))
            self._put(layer, target, budget, draft)
            if rest is not None:
                self._handles.put(layer, body[budget.slots :], *rest)
        if beside:
            relist(row, req.kv, budget.offered, torch.cat([body, target]))
        layout = Layout.BESIDE if beside else Layout.PERMUTED
        self._enter(state, budget, chosen, layout)
        return True

    def _enter(
        self, state: RequestState, budget: Budget, chosen: Chosen, layout: Layout
    ) -> None:
        req = state.req
        state.parts = Parts(
            budget,
            chosen.exact,
            chosen.coded,
            layout,
            not req.skip_radix_cache_insert,
            noted=state.parts.noted if state.parts else [],
        )
        # The row no longer lists token i at index i: the tree must not key it.
        req.skip_radix_cache_insert = True

    def _chosen(
        self, state: RequestState, body: torch.Tensor, budget: Budget, look: Look
    ) -> Chosen:
        """Select the kept tokens of a prompt, or return the earlier selection."""
        if state.parts is not None:
            return Chosen(state.parts.kept, state.parts.coded)
        if self._chooser is None:
            every = torch.arange(budget.offered, dtype=torch.int32, device=body.device)
            shape = (self._geometry.layers, self._geometry.kv_heads, -1)
            exact, coded = coded_rows(every, budget)
            return Chosen(exact.expand(shape), coded.expand(shape))  # views
        stretch = Stretch(0, 1, budget)
        (kept,) = self._chooser.choose(state.rid, body, look, [stretch])
        return Chosen(*coded_rows(kept[:, :, 0], budget))

    def _draft(self, layer: int, body: torch.Tensor, chosen: Chosen) -> DraftLayer:
        packed: list[PartSpec] = []
        if self._codes is not None:
            coded = chosen.coded[layer]
            packed = self._codes.encode(
                layer, *self._handles.pick(layer, body, coded), coded
            )
        pair = self._handles.pick(layer, body, chosen.exact[layer])
        return DraftLayer(*pair, packed)

    def _put(
        self, layer: int, target: torch.Tensor, budget: Budget, draft: DraftLayer
    ) -> None:
        """Write one layer of draft KV into its slots."""
        codes = budget.code_slots
        self._handles.put(layer, target[codes:], draft.keys, draft.values)
        if self._codes is not None:
            self._codes.put(layer, target[:codes], draft.packed)
