"""Compresses prompts by segments, which prompts with a common prefix share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.compression.budget import Budget, budget_for
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.request import Layout, Parts, RequestState
from vericache_sglang.kv.row_edit import (
    allocate,
    free,
    leave_tree,
    own_lock_covers,
    relist,
)
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.kv.segmented_residual import SegmentedResidual
from vericache_sglang.kv.swapped import gathered
from vericache_sglang.prefix_cache.segment_images import DraftPart
from vericache_sglang.prefix_cache.segment_writer import Missing, SegmentWriter, Tail
from vericache_sglang.scheduling.plan import Residency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.compression.base import Selector
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.selection import Look
    from vericache_sglang.kv.transfers import Transfer
    from vericache_sglang.prefix_cache.cached_segments import CachedSegments

    Pair = tuple[torch.Tensor, torch.Tensor]


class SegmentCompressor:
    """Compresses whole segments of prompts into shared draft KV and residual KV.

    In every segment all heads keep equally many tokens, selected by their scores in the
    first prompt that was compressed there; tokens after the last whole segment stay
    uncompressed. A segment has one copy of its draft KV, in the draft-segment pool, and
    one of its residual KV, on the host, for all prompts that begin with it.

    Args:
        config: Compressor budget and protected tokens.
        selector: Bound to the model; None: its selections cannot be shared.
        handles: Pool, block table, host memory.
        segments: Index and copies of cached prefixes.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        selector: Selector | None,
        handles: KVHandles,
        segments: CachedSegments,
    ) -> None:
        self._config = config
        self._selector = selector
        self._handles = handles
        self._segments = segments
        page = handles.geometry.page_size
        if selector is not None:
            page *= selector.needs.token_align
        self._each = budget_for(SEGMENT, config.keep, config.sink_tokens, 0, page)
        self._writer = SegmentWriter(self._each, selector, handles)
        segments.kept = self._each.kept if selector and self._each.dropped else 0

    def budget(self, state: RequestState) -> Budget | None:
        """Return the token counts of a prompt; None if it cannot share segments."""
        counts = self._counts(state.prompt) if self._segments.active else None
        if counts is None or not self._segments.trusts(self._names(state, counts)):
            return None
        return counts

    def takes(self, state: RequestState, budget: Budget) -> bool:
        """Return whether ``budget`` is that of a prompt which this class compresses."""
        return budget == self.budget(state)

    def known(self, state: RequestState) -> bool:
        """Return whether the kept tokens of a prompt are already selected."""
        budget = self.budget(state)
        if budget is None:
            return False
        draft, residual = self._segments.draft, self._segments.residual
        return all(
            draft(name) is not None or residual(name) is not None
            for name in self._names(state, budget)
        )

    def split(
        self,
        state: RequestState,
        to: Residency,
        tree_cache: Any,
        budget: Budget,
        look: Look,
    ) -> tuple[bool, Transfer | None]:
        """Compress a prompt with full KV whose prefill result was processed.

        Args:
            state: The request.
            to: Destination of its residual KV.
            tree_cache: SGLang's prefix cache.
            budget: Token counts of its prompt.
            look: Selector input collected in its prefill, by layer.

        Returns:
            Whether it is compressed (False without free slots or host pages; nothing
            changed then), and the transfer to the host if one was needed.
        """
        names = self._names(state, budget)
        if to is Residency.HOST:
            return self._to_host(state, tree_cache, budget, names, look)
        return self._on_device(state, tree_cache, budget, names, look), None

    def _counts(self, prompt: int) -> Budget | None:
        whole = (prompt - self._config.recent_tokens) // SEGMENT
        each = self._each
        if self._selector is None or prompt < self._config.min_prompt:
            return None
        if whole < 1 or not each.dropped:
            return None
        return Budget(whole * SEGMENT, whole * each.kept, each.sinks, 0)

    def _names(self, state: RequestState, budget: Budget) -> list[str]:
        count = budget.offered // SEGMENT
        req = state.req
        names: list[str] = getattr(req, "vericache_names", [])
        if len(names) < count:
            tokens = (req.origin_input_ids + req.output_ids)[: budget.offered]
            names = self._segments.names((req.extra_key, req.cache_salt), tokens)
        return names[:count]

    def _to_host(
        self,
        state: RequestState,
        tree_cache: Any,
        budget: Budget,
        names: Sequence[str],
        look: Look,
    ) -> tuple[bool, Transfer | None]:
        """See ``PromptCompressor.to_host``; shared segments are not copied again.

        Returns:
            Whether it is compressed, and the transfer to the host if one was needed.
        """
        req, row = state.req, self._handles.row(state)
        body = row[: budget.offered].to(torch.int64).clone()
        owned = req.kv.cache_protected_len
        tail = self._tail(state, budget)
        with self._segments.kept_back(names):
            missing = self._missing(state, names, residuals=True)
            drafted = self._each.kept * sum(each.drafted for each in missing)
            slots = drafted + tail.slots
            fresh = allocate(tree_cache, slots)
            if fresh is None and not own_lock_covers(req, tree_cache, slots):
                return False, None
            if not self._open_residuals(missing):
                free(tree_cache, body[:0] if fresh is None else fresh)
                return False, None
            if fresh is not None:
                self._writer.place(missing, fresh[:drafted])
            waiting: list[Pair] = []
            try:
                transfer = self._writer.write(state, missing, body, look, waiting)
            except TransferError:
                self._close_residuals(missing)
                free(tree_cache, body[:0] if fresh is None else fresh)
                raise
            self._save_scores(state, missing, body)
            leave_tree(req, tree_cache)
            free(tree_cache, body[owned:])
            if fresh is None:
                fresh = self._taken_back(tree_cache, slots)
                self._writer.put_waiting(missing, fresh[:drafted], waiting)
            tail.put(self._handles, self._segments.copies, row, fresh[drafted:])
            self._share(missing)
        self._segments.settle(names)
        self._segments.use(state.rid, names)
        self._refer(state, names)
        head = self._enter(state, budget, names, Layout.KEPT)
        relist(row, req.kv, budget.offered, head)
        req.kv.cache_protected_len = len(head)
        return True, transfer

    def _on_device(
        self,
        state: RequestState,
        tree_cache: Any,
        budget: Budget,
        names: Sequence[str],
        look: Look,
    ) -> bool:
        """See ``PromptCompressor.on_device``; only the draft KV is shared."""
        body = self._handles.row(state)[: budget.offered].to(torch.int64).clone()
        with self._segments.kept_back(names):
            missing = self._missing(state, names, residuals=False)
            slots = self._each.kept * sum(each.drafted for each in missing)
            fresh = allocate(tree_cache, slots)
            if fresh is None:
                return False
            self._writer.place(missing, fresh)
            self._writer.write(state, missing, body, look)
            self._share(missing)
        self._segments.settle(names)
        self._segments.use(state.rid, names)
        self._enter(state, budget, names, Layout.BESIDE)
        return True

    def offload(
        self, state: RequestState, tree_cache: Any
    ) -> tuple[bool, Transfer | None]:
        """Offload the residual KV of a request's segments that the host lacks.

        Args:
            state: On the device, with shared draft KV.
            tree_cache: SGLang's prefix cache.

        Returns:
            Whether there were enough slots and host pages, and the transfer if one was
            needed.
        """
        parts = state.split
        names, row = parts.segments, self._handles.row(state)
        body = row[: parts.budget.offered].to(torch.int64).clone()
        tail = self._tail(state, parts.budget)
        with self._segments.kept_back(names):
            fresh = allocate(tree_cache, tail.slots)
            if fresh is None:
                return False, None
            missing = self._missing(state, names, residuals=True)
            if not self._open_residuals(missing):
                free(tree_cache, fresh)
                return False, None
            try:
                if state.layout is Layout.PERMUTED:
                    transfer = self._writer.save_permuted(state, missing, body)
                else:
                    transfer = self._writer.write(state, missing, body, None)
            except TransferError:
                self._close_residuals(missing)
                free(tree_cache, fresh)
                raise
            tail.put(self._handles, self._segments.copies, row, fresh)
            self._save_scores(state, missing, body)
        self._segments.settle(names)
        self._refer(state, names)
        return True, transfer

    def finish(self, state: RequestState) -> None:
        """Cache the whole segments that a finished request appended to its prefix.

        The request has no full KV on the device, so the radix tree cannot take it.

        Args:
            state: With residual KV on the host and shared draft KV.
        """
        parts, req = state.split, state.req
        tokens = (req.origin_input_ids + req.output_ids)[: state.verified]
        first = parts.budget.offered // SEGMENT
        if not parts.insertable or len(tokens) // SEGMENT <= first:
            return
        names = self._segments.names((req.extra_key, req.cache_salt), tokens)
        row = self._handles.row(state)
        added = row[parts.head : parts.head + (len(names) - first) * SEGMENT]
        self._segments.keep(names, first, added.to(torch.int64))

    def _tail(self, state: RequestState, budget: Budget) -> Tail:
        """Read the tree-owned KV after the last segment, to copy to request slots."""
        owned = state.req.kv.cache_protected_len
        pool = self._handles.pool
        start = budget.offered
        if state.layout is Layout.PERMUTED or owned <= start:
            return Tail(start, 0, [], None)
        slots = self._handles.row(state)[start:owned].to(torch.int64).clone()
        blocks = list(gathered(pool.k_buffer, pool.v_buffer, slots))
        return Tail(start, len(slots), blocks, self._segments.copies.scores_of(slots))

    def _taken_back(self, tree_cache: Any, slots: int) -> torch.Tensor:
        """Allocate the slots that this prompt has just released to the tree."""
        fresh = allocate(tree_cache, slots)
        if fresh is None:
            raise InvariantError("a prompt's own slots are taken by somebody else")
        return fresh

    # -- what is missing ------------------------------------------------------

    def _missing(
        self, state: RequestState, names: Sequence[str], *, residuals: bool
    ) -> list[Missing]:
        """Return the segments that lack a part, in prompt order."""
        found = []
        for at, name in enumerate(names):
            part = self._segments.draft(name)
            rest = residuals and self._segments.residual(name) is None
            if part is not None and not rest:
                continue
            kept = self._kept_of(name, part)
            if kept is None:
                kept = self._known(state, at)
            found.append(
                Missing(
                    at=at,
                    name=name,
                    kept=kept,
                    drafted=part is None,
                    wanted=rest,
                )
            )
        return found

    def _kept_of(self, name: str, part: DraftPart | None) -> torch.Tensor | None:
        """Return the kept tokens recorded with an existing part, so that both match."""
        if part is not None:
            return part.kept
        rest = self._segments.residual(name)
        # A synchronous copy: the host pages may be reused soon.
        return None if rest is None else rest.kept.to(self._handles.device, copy=True)

    def _known(self, state: RequestState, at: int) -> torch.Tensor | None:
        """Return the tokens kept when this request was compressed before, or None."""
        if state.parts is None:
            return None
        n = self._each.kept
        return state.parts.kept[:, :, at * n : (at + 1) * n] - at * SEGMENT

    def _open_residuals(self, missing: list[Missing]) -> bool:
        """Allocate host memory for residual KV; all of it or nothing."""
        opened = self._segments.open_residuals(
            [each.name for each in missing if each.wanted],
            self._each.dropped,
            self._each.kept,
        )
        if opened is None:
            return False
        for each in missing:
            each.rest = opened.get(each.name)
        return True

    def _close_residuals(self, missing: list[Missing]) -> None:
        """Free host memory that was not filled."""
        for each in missing:
            if each.rest is not None:
                self._segments.drop_residual(each.name)

    def _save_scores(
        self, state: RequestState, missing: list[Missing], body: torch.Tensor
    ) -> None:
        """Save token scores beside the new residual KV, for later restores.

        Args:
            state: The request.
            missing: The parts that are written.
            body: [B] int64, its prompt's slots; in token order if not yet compressed.
        """
        opened = [each for each in missing if each.rest is not None]
        if not opened:
            return
        if state.parts is None:
            noted = self._segments.copies.scores_of(body)
        else:
            known = state.parts.noted
            noted = torch.stack(known) if known else None
        if noted is not None:
            noted = noted.cpu()
            for each in opened:
                self._segments.save_scores(each.name, noted[:, :, each.tokens])

    # -- recording the result ------------------------------------------------

    def _refer(self, state: RequestState, names: Sequence[str]) -> None:
        """Make the residual KV of these segments that of the request."""
        self._segments.refer(state.rid, names)
        found = [self._segments.residual(name) for name in names]
        whole = SegmentedResidual([each for each in found if each is not None])
        # A name is a chained hash: the last one implies all others.
        self._handles.host.adopt(state.rid, f"segments-{names[-1]}", whole)

    def _share(self, missing: list[Missing]) -> None:
        """Add new draft KV to the draft-segment pool."""
        for each in missing:
            if each.drafted and each.slots is not None:
                part = DraftPart(each.slots, each.chosen.contiguous())
                self._segments.add_draft(each.name, part)

    def _enter(
        self,
        state: RequestState,
        budget: Budget,
        names: Sequence[str],
        layout: Layout,
    ) -> torch.Tensor:
        """Record the compression; return the slots of the draft KV, [n] int64."""
        parts = [self._segments.draft(name) for name in names]
        listed = [part for part in parts if part is not None]
        kept = torch.cat(
            [part.kept + i * SEGMENT for i, part in enumerate(listed)], dim=2
        )
        head = torch.cat([part.slots for part in listed])
        known = state.parts
        state.parts = Parts(
            budget,
            kept,
            kept[:, :, :0],
            layout,
            not state.req.skip_radix_cache_insert,
            noted=known.noted if known else [],
            segments=tuple(names),
            shared_slots=head,
        )
        # The row no longer lists token i at position i: the tree must not insert it.
        state.req.skip_radix_cache_insert = True
        return head
