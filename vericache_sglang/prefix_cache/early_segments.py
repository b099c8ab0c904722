"""Segments whose draft KV is used before their residual KV has come from the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.kv.row_edit import allocate
from vericache_sglang.prefix_cache.segment_images import SegmentDraft

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import torch

    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.prefix_cache.cached_segments import CachedSegments
    from vericache_sglang.prefix_cache.store.segment_store import Found


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
        """Return whether stored draft KV keeps the tokens that what is here keeps."""
        segments = self._segments
        if not segments.active or not segments.trusts(names):
            return False
        for name, found in zip(names, drafts, strict=True):
            for held in (segments.draft(name), segments.residual(name)):
                stored = found.parts["draft"]["kept"]
                if held is not None and not held.kept.cpu().equal(stored):
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
        segments, device = self._segments, self._handles.device
        with segments.kept_back(names):
            new = [
                (name, found.parts["draft"])
                for name, found in zip(names, drafts, strict=True)
                if segments.draft(name) is None
            ]
            slots = allocate(tree_cache, sum(each["kept"].shape[2] for _, each in new))
            if slots is None:
                return None
            at = 0
            for name, each in new:
                begin, at = at, at + each["kept"].shape[2]
                own = slots[begin:at]
                pairs = zip(each["keys"], each["values"], strict=True)
                self._handles.transfers.bring(pairs, own, [])
                segments.add_draft(name, SegmentDraft(own, each["kept"].to(device)))
            segments.use(rid, names)
        found = [segments.draft(name) for name in names]
        return [each for each in found if each is not None]

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
        rest, kept = found.parts["residual"], part.kept.cpu()
        opened = segments.open_residuals([name], rest["keys"].shape[1], kept.shape[2])
        if opened is None:
            return False
        residual = opened[name]
        residual.describe(kept, kept[..., :0])
        for layer, pair in enumerate(zip(rest["keys"], rest["values"], strict=True)):
            residual.write(layer, *pair)
        if noted is not None:
            segments.save_scores(name, noted)
        return True
