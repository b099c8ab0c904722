"""Compresses prefilled prompts into draft KV and residual KV, on device or host."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from vericache_sglang.compression.budget import Budget, budget_for
from vericache_sglang.compression.placed import placed
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.picked_residual import PickedResidual
from vericache_sglang.kv.plane_residual import PlaneResidual
from vericache_sglang.kv.request import Parts, RequestState
from vericache_sglang.kv.row_edit import (
    allocate,
    free,
    leave_tree,
    own_slots_cover,
    relist,
)
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.kv.segmented_residual import SegmentedResidual
from vericache_sglang.kv.swapped import gathered
from vericache_sglang.prefix_cache.prompt_pieces import (
    DraftLayer,
    HostFull,
    PieceWriter,
    PromptPiece,
    place,
)
from vericache_sglang.prefix_cache.segment import Form, Use
from vericache_sglang.prefix_cache.segment_images import SegmentDraft
from vericache_sglang.scheduling.plan import Residency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.compression.base import Selector
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.packed_drafts import Codes
    from vericache_sglang.kv.residual import HostResidual
    from vericache_sglang.kv.selection import Look
    from vericache_sglang.kv.transfers import Transfer
    from vericache_sglang.prefix_cache.cached_segments import CachedSegments
    from vericache_sglang.prefix_cache.segment_copies import SegmentCopies


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """KV of the tree-owned tokens after the last piece, which a request copies.

    Attributes:
        start: Position of the first of them.
        slots: Their number, in whole pages.
        blocks: Keys and values of each layer.
        noted: [L, H, slots], their scores; None without scores.
    """

    start: int
    slots: int
    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    noted: torch.Tensor | None

    def put(
        self,
        handles: KVHandles,
        copies: SegmentCopies,
        row: torch.Tensor,
        fresh: torch.Tensor,
    ) -> None:
        """Write them into request-owned slots, and list these in the block table."""
        copies.give_scores(fresh, self.noted)
        for layer, (keys, values) in enumerate(self.blocks):
            handles.put(layer, fresh, keys, values)
        row[self.start : self.start + self.slots] = fresh.to(row.dtype)


class PromptCompressor:
    """Compresses prompts: moves KV between a row's slots, new slots and the host.

    A prompt is a list of pieces. If the kept tokens of a segment are the same for every
    prompt that begins with it, its whole segments are pieces with one copy of draft KV,
    in the draft-segment pool, and one of residual KV, on the host; in each of them all
    heads keep equally many tokens, selected by their scores in the first prompt that
    was compressed there. A codec packs all of these. Otherwise the whole pages of the
    prompt are one piece, whose draft KV belongs to the request. Its first segments
    share one copy of full KV on the host, of which the residual KV is picked, unless a
    codec packs the draft KV. Tokens after the last piece stay uncompressed.

    Slots owned by the prefix tree are never written, because other rows may list them:
    draft KV gets slots of its own, and the tree keeps its full copy until it is
    evicted. If no slot is free for a compression to the host, the draft KV waits until
    the request has left its prompt's slots, so device memory never exceeds the full KV.

    Args:
        config: Compressor budget and protected tokens.
        selector: Bound to the model; None: every token is kept.
        codes: Packs kept tokens; None: nothing is packed.
        handles: Pool, block table, host memory.
        segments: Index and copies of cached prefixes.
        shareable: Selections depend on the preceding tokens alone.
    """

    def __init__(
        self,
        config: VeriCacheConfig,
        selector: Selector | None,
        codes: Codes | None,
        handles: KVHandles,
        segments: CachedSegments,
        *,
        shareable: bool,
    ) -> None:
        self._config = config
        self._codes = codes
        self._handles = handles
        self._host = handles.host
        self._segments = segments
        self._writer = PieceWriter(selector, codes, handles)
        self._align = handles.geometry.page_size
        if selector is not None:
            self._align *= selector.needs.token_align
        self._keep = 1.0 if selector is None else config.keep
        self._each = self._segment_budget()
        smaller = self._each.slots < self._each.offered
        segments.kept = self._each.kept if shareable and smaller else 0

    # -- token counts ---------------------------------------------------------

    def _segment_budget(self) -> Budget:
        """Return the counts of the first segment of a prompt of shared segments."""
        codes, sinks = self._codes, self._config.sink_tokens
        align = self._align if codes is None else math.lcm(self._align, codes.block)
        budget = budget_for(SEGMENT, self._keep, sinks, 0, align)
        if codes is None:
            return budget
        return replace(codes.segment(SEGMENT, budget.kept), sinks=budget.sinks)

    def budget(self, prompt: int, share: float | None = None) -> Budget | None:
        """Return the counts for a prompt of one request; None: not compressed.

        Args:
            prompt: T, in tokens.
            share: Share of tokens the method asks to keep; None: as configured.
        """
        page = self._handles.geometry.page_size
        body = prompt // page * page
        if prompt < self._config.min_prompt or body == 0:
            return None
        budget = budget_for(
            body,
            self._keep if share is None else share,
            self._config.sink_tokens,
            max(0, self._config.recent_tokens - (prompt - body)),
            self._align,
        )
        if self._codes is not None:
            budget = self._codes.complete(budget)
        return budget if budget.slots < budget.offered else None

    def shared_budget(self, state: RequestState) -> Budget | None:
        """Return the counts of a prompt of shared segments; None if it has none."""
        whole = (state.prompt - self._config.recent_tokens) // SEGMENT
        if not self._segments.active or not self._segments.kept or whole < 1:
            return None
        if state.prompt < self._config.min_prompt:
            return None
        counts = self.of_segments(whole)
        return counts if self._segments.trusts(self._names(state, counts)) else None

    def of_segments(self, count: int) -> Budget:
        """Return the counts of ``count`` shared segments, >= 1."""
        return self._each.times(count)

    def known(self, state: RequestState) -> bool:
        """Return whether the kept tokens of a prompt are already selected."""
        budget = self.shared_budget(state)
        if budget is None:
            return False
        return all(
            self._segments.draft(name) is not None
            or self._copied(name)
            or self._selecting(name) is not None
            for name in self._names(state, budget)
        )

    def _copied(self, name: str) -> bool:
        """Return whether packed draft KV of a segment is on the host."""
        found = self._segments.copies.index.find(name)
        return self._codes is not None and found.has(Form.DRAFT)

    def _selecting(self, name: str) -> HostResidual | None:
        """Return residual KV that is of one selection, if a segment has such.

        Beside a codec without residual planes it is the full KV.
        """
        rest = self._segments.residual(name)
        fits_any = self._codes is not None and not isinstance(rest, PlaneResidual)
        return None if fits_any else rest

    def _names(self, state: RequestState, budget: Budget) -> list[str]:
        count = budget.offered // SEGMENT
        req = state.req
        names: list[str] = getattr(req, "vericache_names", [])
        if len(names) < count:
            tokens = (req.origin_input_ids + req.output_ids)[: budget.offered]
            names = self._segments.names((req.extra_key, req.cache_salt), tokens)
        return names[:count]

    # -- moves ----------------------------------------------------------------

    def to_host(
        self,
        state: RequestState,
        tree_cache: Any,
        budget: Budget,
        look: Look | None = None,
    ) -> tuple[bool, Transfer | None]:
        """Compress a prompt, or offload a compressed one: residual KV to the host.

        Args:
            state: A request whose row lists the full KV and whose prefill was
                processed.
            tree_cache: SGLang's prefix cache.
            budget: Counts of its prompt.
            look: Observations of its prefill, by layer; None once it is compressed.

        Returns:
            Whether it was made (False without free slots or host pages; nothing
            changed then), and the transfer to the host if one was needed.

        Raises:
            TransferError: The copy could not be made; nothing changed.
        """
        req, row = state.req, self._handles.row(state)
        body = row[: budget.offered].to(torch.int64).clone()
        owned = req.kv.cache_protected_len
        before = state.split.head if state.parts else budget.offered
        pieces = self._pieces(state, budget)
        names = [each.name for each in pieces if each.name]
        tail = self._tail(state, budget)
        with self._segments.kept_back([*names, *pieces[0].segments]):
            self._find(state, pieces, residuals=True)
            drafted = sum(each.budget.slots for each in pieces if each.drafted)
            slots = drafted + tail.slots
            fresh = allocate(tree_cache, slots)
            own = budget.offered - owned
            if fresh is None and not own_slots_cover(req, tree_cache, slots, own):
                return False, None
            taken = body[:0] if fresh is None else fresh
            if not self._open(state, pieces, body):
                free(tree_cache, taken)
                return False, None
            waiting: list[DraftLayer] = []
            try:
                place(pieces, fresh)
                transfer = self._writer.write(state.rid, pieces, body, look, waiting)
            except Exception:
                self._close(state, pieces)
                free(tree_cache, taken)
                raise
            self._save_scores(state, pieces, body)
            leave_tree(req, tree_cache)
            free(tree_cache, body[owned:])
            if fresh is None:
                fresh = self._put_waiting(state.rid, tree_cache, pieces, slots, waiting)
            self._place_copies(pieces)
            tail.put(self._handles, self._segments.copies, row, fresh[drafted:])
            self._share(pieces)
        self._segments.settle(names)
        head = self._enter(state, budget, pieces, Residency.HOST)
        self._refer(state, names, pieces[0].full)
        relist(row, req.kv, before, head)
        req.kv.cache_protected_len = state.split.shared_count
        return True, transfer

    def complete(self, state: RequestState) -> None:
        """Have a request refer to the residual KV that was read for its segments."""
        parts = state.split
        self._segments.settle(parts.segments)
        self._refer(state, parts.segments, None)
        parts.residency = Residency.HOST

    def on_device(
        self, state: RequestState, tree_cache: Any, budget: Budget, look: Look
    ) -> bool:
        """Compress a prompt; its full KV stays in the pool, beside the draft KV.

        Returns:
            False where there is no room for the draft KV; nothing changed.
        """
        row = self._handles.row(state)
        body = row[: budget.offered].to(torch.int64).clone()
        pieces = self._pieces(state, budget)
        names = [each.name for each in pieces if each.name]
        with self._segments.kept_back(names):
            self._find(state, pieces, residuals=False)
            slots = sum(each.budget.slots for each in pieces if each.drafted)
            fresh = allocate(tree_cache, slots)
            if fresh is None:
                return False
            place(pieces, fresh)
            self._writer.write(state.rid, pieces, body, look, [])
            self._place_copies(pieces)
            self._share(pieces)
        self._segments.settle(names)
        head = self._enter(state, budget, pieces, Residency.DEVICE)
        if not names:
            relist(row, state.req.kv, budget.offered, torch.cat([body, head]))
        return True

    def _put_waiting(
        self,
        rid: str,
        tree_cache: Any,
        pieces: list[PromptPiece],
        slots: int,
        waiting: list[DraftLayer],
    ) -> torch.Tensor:
        """Write draft KV that waited for the slots of its own prompt; return these."""
        fresh = allocate(tree_cache, slots)
        if fresh is None:
            raise InvariantError(f"{rid}: its own prompt's slots are taken")
        place(pieces, fresh)
        new = [each.slots for each in pieces if each.drafted and not each.on_host]
        target = torch.cat([fresh[:0], *(each for each in new if each is not None)])
        for layer, draft in enumerate(waiting):
            self._writer.put(layer, target, draft)
        return fresh

    def _place_copies(self, pieces: list[PromptPiece]) -> None:
        """Write packed draft KV that is on the host into its slots."""
        for each in pieces:
            if each.on_host and each.slots is not None:
                self._segments.copies.place_draft(each.name, each.slots)

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
        """Read the tree-owned KV after the last piece, to copy to request slots."""
        start, owned = budget.offered, state.req.kv.cache_protected_len
        if owned <= start:
            return Tail(start, 0, [], None)
        pool = self._handles.pool
        slots = self._handles.row(state)[start:owned].to(torch.int64).clone()
        blocks = list(gathered(pool.k_buffer, pool.v_buffer, slots))
        return Tail(start, len(slots), blocks, self._segments.copies.scores_of(slots))

    # -- pieces ---------------------------------------------------------------

    def _pieces(self, state: RequestState, budget: Budget) -> list[PromptPiece]:
        """Return the pieces of a prompt, with the tokens this request kept before."""
        parts = state.parts
        if parts is not None and state.residency is Residency.DEVICE:
            shared = parts.shared_slots is not None
        else:
            shared = budget == self.shared_budget(state)
        if not shared:
            found = PromptPiece(0, budget, segments=self._cached(state, budget))
            if parts is not None:
                found.kept, found.coded = parts.kept, parts.coded
            return [found]
        each, n, c = self._each, self._each.exact, self._each.coded
        others = replace(each, sinks=0)
        pieces = []
        for at, name in enumerate(self._names(state, budget)):
            found = PromptPiece(at * SEGMENT, others if at else each, name)
            if parts is not None:
                kept = parts.kept[:, :, at * n : (at + 1) * n]
                coded = parts.coded[:, :, at * c : (at + 1) * c]
                found.kept, found.coded = kept - found.first, coded - found.first
            pieces.append(found)
        return pieces

    def _find(
        self, state: RequestState, pieces: list[PromptPiece], *, residuals: bool
    ) -> None:
        """Find the draft KV of pieces, and which parts have to be written."""
        own = state.parts if state.residency is Residency.DEVICE else None
        for each in pieces:
            if not each.name:
                each.drafted, each.wanted = own is None, residuals
                if own is not None:
                    row = self._handles.row(state)[own.budget.offered : own.head]
                    each.slots = row.to(torch.int64).clone()
                continue
            part = self._segments.draft(each.name)
            rest = self._segments.residual(each.name)
            each.drafted = part is None
            each.wanted = residuals and rest is None
            # Both parts must be of one selection, so an existing part decides.
            if part is not None:
                each.kept, each.coded, each.slots = part.kept, part.coded, part.slots
            else:
                self._select_as_before(each)

    def _select_as_before(self, piece: PromptPiece) -> None:
        """Take the tokens of a piece over from what the host has of its draft KV."""
        copies, device = self._segments.copies, self._handles.device
        # Synchronous copies: the host pages may be reused soon.
        if self._copied(piece.name):
            found = copies.images_of(piece.name, Form.DRAFT)
            if found is not None:
                coded = found["coded"].read().to(device, copy=True)
                piece.kept, piece.coded, piece.on_host = coded[..., :0], coded, True
                return
        rest = self._selecting(piece.name)
        if rest is not None:
            piece.kept = rest.kept.to(device, copy=True)
        if isinstance(rest, PlaneResidual):
            piece.coded = rest.coded.read().to(device, copy=True)

    def _cached(self, state: RequestState, budget: Budget) -> tuple[str, ...]:
        """Return the first segments of a prompt of its own that are cached as full KV.

        None with a codec, whose residual KV is smaller than full KV; nor if the request
        opted out of the radix tree.
        """
        parts, req = state.parts, state.req
        own = parts.insertable if parts else not req.skip_radix_cache_insert
        shares = own and self._segments.shares_full_kv
        if self._codes or self._segments.kept or not shares:
            return ()
        return tuple(self._segments.wholes.first(self._names(state, budget)))

    def _open_full(
        self, state: RequestState, piece: PromptPiece, body: torch.Tensor
    ) -> HostFull | None:
        """Allocate host memory for the full KV of a prompt that is not there yet.

        Returns:
            None without free host pages, and none was allocated.
        """
        wholes, ends = self._segments.wholes, len(piece.segments) * SEGMENT
        new = [i for i, name in enumerate(piece.segments) if wholes.get(name) is None]
        parts = [slice(at * SEGMENT, (at + 1) * SEGMENT) for at in new]
        noted = self._noted(state, body) if new else None
        opened = wholes.open(
            {
                piece.segments[at]: None if noted is None else noted[:, :, part]
                for at, part in zip(new, parts, strict=True)
            }
        )
        if opened is None:
            return None
        own = []
        if ends < len(body):
            try:
                own.append(self._host.open_full(len(body) - ends))
            except TransferError:
                wholes.drop(opened)
                return None
        images = [wholes.get(name) for name in piece.segments]
        every = torch.arange(len(body))
        missing = torch.cat([*(every[part] for part in parts), every[ends:]])
        return HostFull(
            piece.segments,
            [*(image for image in images if image is not None), *own],
            opened,
            own,
            placed(missing, body.device),
        )

    def _open(
        self, state: RequestState, pieces: list[PromptPiece], body: torch.Tensor
    ) -> bool:
        """Allocate host memory for residual KV; all of it or nothing."""
        if not pieces[0].name:
            (piece,) = pieces
            if piece.segments:
                piece.full = self._open_full(state, piece, body)
                return piece.full is not None
            if not self._host.fits_residual(piece.budget):
                return False
            piece.residual = self._host.open(state.rid, piece.budget)
            return True
        opened = self._segments.open_residuals(
            [each.name for each in pieces if each.wanted], self._each
        )
        if opened is None:
            return False
        for each in pieces:
            each.residual = opened.get(each.name)
        return True

    def _close(self, state: RequestState, pieces: list[PromptPiece]) -> None:
        """Free host memory that was not filled."""
        for each in pieces:
            if each.full is not None:
                self._segments.wholes.drop(each.full.opened)
                for image in each.full.own:
                    image.free()
            elif not each.name:
                self._host.drop(state.rid)
            elif each.residual is not None:
                self._segments.drop_residual(each.name)

    def _save_scores(
        self, state: RequestState, pieces: list[PromptPiece], body: torch.Tensor
    ) -> None:
        """Save token scores beside the new residual KV of segments, for restores."""
        opened = [each for each in pieces if each.name and each.residual is not None]
        noted = self._noted(state, body) if opened else None
        if noted is not None:
            noted = noted.cpu()
            for each in opened:
                self._segments.save_scores(each.name, noted[:, :, each.tokens])

    def _noted(self, state: RequestState, body: torch.Tensor) -> torch.Tensor | None:
        """Return the scores [L, H, B] of a prompt's tokens; None without scores."""
        if state.parts is None:
            return self._segments.copies.scores_of(body)
        known = state.parts.noted
        return torch.stack(known) if known else None

    # -- recording the result -------------------------------------------------

    def _share(self, pieces: list[PromptPiece]) -> None:
        """Add new draft KV of segments to the draft-segment pool."""
        for each in pieces:
            if each.name and each.drafted and each.slots is not None:
                coded = each.packed.contiguous() if self._codes else None
                part = SegmentDraft(each.slots, each.exact.contiguous(), coded)
                self._segments.add_draft(each.name, part)

    def _refer(
        self, state: RequestState, names: Sequence[str], full: HostFull | None
    ) -> None:
        """Make KV that is shared on the host the residual KV of the request.

        Args:
            names: Segments whose residual KV it shares.
            full: Full KV that it shares instead; None without such.
        """
        host = self._host
        if full is not None:
            self._segments.refer(state.rid, full.names, Use.IMAGES)
            self._segments.wholes.settle(full.names)
            kept = state.split.kept
            picked = PickedResidual(full.images, kept, host.page_pool, host.dtype)
            host.adopt(state.rid, "", picked, full.own)
        if not names:
            return
        self._segments.refer(state.rid, names)
        found = [self._segments.residual(name) for name in names]
        whole = SegmentedResidual([each for each in found if each is not None])
        # A name is a chained hash: the last one implies all others.
        host.adopt(state.rid, f"segments-{names[-1]}", whole)

    def _enter(
        self,
        state: RequestState,
        budget: Budget,
        pieces: list[PromptPiece],
        residency: Residency,
    ) -> torch.Tensor:
        """Record the compression; return the slots of the draft KV, [n] int64."""
        head = torch.cat([each.slots for each in pieces if each.slots is not None])
        known = state.parts
        names = tuple(each.name for each in pieces if each.name)
        segments = names or pieces[0].segments
        if known is not None and known.residency is not None:
            known.residency, known.segments = residency, segments
            return head
        if names:
            self._segments.use(state.rid, names)
        state.parts = Parts(
            budget,
            torch.cat([each.exact + each.first for each in pieces], dim=2),
            torch.cat([each.packed + each.first for each in pieces], dim=2),
            residency,
            not state.req.skip_radix_cache_insert,
            noted=known.noted if known else [],
            segments=segments,
            shared_slots=head if names else None,
        )
        # The row no longer lists token i at position i: the tree must not insert it.
        state.req.skip_radix_cache_insert = True
        return head
