"""Segments whose draft KV is used before their residual KV has come from the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vericache_sglang.kv.plane_residual import PlaneResidual
from vericache_sglang.kv.request import Parts
from vericache_sglang.kv.row_edit import allocate
from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.segment_images import SegmentDraft
from vericache_sglang.scheduling.plan import Residency

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.prefix_cache.cached_segments import CachedSegments
    from vericache_sglang.prefix_cache.store.found import Found


class EarlySegments:
    """Puts draft KV from the store on the device, and residual KV on the host.

    Until both parts of a segment are there, the index does not list it: no prompt is
    matched with it, and its draft KV is freed with its last user. ``settle`` of
    ``CachedSegments`` enters it.

    Args:
        segments: Their records.
        handles: Pool and transfers.
    """

    def __init__(self, segments: CachedSegments, handles: KVHandles) -> None:
        self._segments = segments
        self._handles = handles

    def fit(self, names: Sequence[str], drafts: Sequence[Found]) -> bool:
        """Return whether stored draft KV keeps the tokens that what is here keeps.

        Codes from the store do not fit beside full KV that was computed here: what is
        joined with them later must be of the same rounding.
        """
        segments, where = self._segments, self._segments.copies.where
        if not segments.active or not segments.trusts(names):
            return False
        for name, found in zip(names, drafts, strict=True):
            stored = found.parts["draft"][where]
            part, rest = segments.draft(name), segments.residual(name)
            known = segments.copies.index.get(name)
            whole = known is not None and not (known.split or known.content.away)
            if whole and where == "coded":
                return False
            held = [] if part is None else [part.where[where]]
            if isinstance(rest, PlaneResidual):
                held.append(rest.coded.read())
            elif rest is not None and where == "kept":
                held.append(rest.kept)
            # Full KV beside codes is of no selection.
            if not all(each.cpu().equal(stored) for each in held):
                return False
        return True

    def enter(
        self, rid: str, names: Sequence[str], drafts: Sequence[Found], tree_cache: Any
    ) -> list[SegmentDraft] | None:
        """Have a request use the draft KV of segments, which is put on the device.

        Args:
            rid: The request.
            names: Its prompt's first segments, which ``fit``.
            drafts: Their draft KV.
            tree_cache: SGLang's prefix cache.

        Returns:
            Their draft KV on the device; None without free slots, and nothing changed.
        """
        segments, copies = self._segments, self._segments.copies
        with segments.kept_back(names):
            new = {
                name: found.parts["draft"]
                for name, found in zip(names, drafts, strict=True)
                if segments.draft(name) is None
            }
            counts = [
                copies.counts(SEGMENT, each[copies.where].shape[2]).slots
                for each in new.values()
            ]
            slots = allocate(tree_cache, sum(counts))
            if slots is None:
                return None
            for (name, each), own in zip(new.items(), slots.split(counts), strict=True):
                pairs = zip(each["keys"], each["values"], strict=True)
                self._handles.transfers.bring(pairs, own[: each["keys"].shape[1]], [])
                where = each[copies.where].to(self._handles.device)
                coded = None if copies.where == "kept" else where
                exact = where if coded is None else where[..., :0]
                segments.add_draft(name, SegmentDraft(own, exact, coded))
            segments.use(rid, names)
        found = [segments.draft(name) for name in names]
        return [each for each in found if each is not None]

    def parts(
        self,
        budget: Budget,
        names: Sequence[str],
        drafts: Sequence[SegmentDraft],
        found: Sequence[Found],
    ) -> Parts:
        """Return the parts of a prompt whose residual KV is still in the store.

        Args:
            budget: Counts of its segments.
            names: Its segments.
            drafts: Their draft KV on the device.
            found: The same as it was stored, with the scores of the tokens.
        """
        scores = [each.parts["draft"].get("noted") for each in found]
        noted = [each.to(self._handles.device) for each in scores if each is not None]
        firsts = range(0, len(drafts) * SEGMENT, SEGMENT)
        pairs = list(zip(drafts, firsts, strict=True))
        return Parts(
            budget,
            torch.cat([each.kept + first for each, first in pairs], dim=2),
            torch.cat([each.packed + first for each, first in pairs], dim=2),
            Residency.STORE,
            insertable=True,
            noted=list(torch.cat(noted, dim=2)) if len(noted) == len(found) else [],
            segments=tuple(names),
            shared_slots=torch.cat([each.slots for each in drafts]),
        )

    def list_row(self, req: Any, parts: Parts, own: torch.Tensor) -> None:
        """List a prompt's draft KV in the row of a request, and slots behind it.

        Args:
            req: SGLang's request, which has a row.
            parts: Of its prompt, see ``parts``.
            own: [n] int64, slots of the tokens behind the segments.
        """
        row, shared = self._handles.table[req.kv.req_pool_idx], parts.shared_slots
        slots = own if shared is None else torch.cat([shared, own])
        row[: len(slots)] = slots.to(row.dtype)
        req.kv.kv_committed_len = req.kv.kv_allocated_len = len(slots)
        req.kv.cache_protected_len, req.last_node = parts.shared_count, None
        parts.insertable = not req.skip_radix_cache_insert
        req.skip_radix_cache_insert = True

    def take(self, name: str, found: Found, noted: torch.Tensor | None) -> bool:
        """Copy residual KV that was read to the host.

        Args:
            name: A segment that a request uses.
            found: Its residual KV.
            noted: [L, H, tokens], scores of its tokens; None without scores.

        Returns:
            False without free host pages.
        """
        segments, part = self._segments, self._segments.draft(name)
        if segments.residual(name) is not None or part is None:
            return part is not None
        exact, coded = part.kept.cpu(), part.packed.cpu()
        counts = segments.copies.counts(SEGMENT, exact.shape[2] + coded.shape[2])
        opened = segments.open_residuals([name], counts)
        if opened is None:
            return False
        opened[name].describe(exact, coded)
        opened[name].fill(found.parts["residual"])
        if noted is not None:
            segments.save_scores(name, noted)
        return True
