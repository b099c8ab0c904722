"""Full KV of segments on the host, from which requests read their residual KV."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from vericache_sglang.kv.segment_length import SEGMENT
from vericache_sglang.prefix_cache.segment import Form

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from vericache_sglang.kv.host_image import RawImage
    from vericache_sglang.prefix_cache.segment_copies import SegmentCopies
    from vericache_sglang.prefix_cache.segment_tiers import SegmentTiers


class WholeSegments:
    """Segments with full KV on the host, where each is once for all its users.

    A user protects a segment from eviction (``CachedSegments.refer``). Without users it
    is a cached prefix like any other.

    Args:
        copies: Images of segments, and their records.
        tiers: Records and evicts segments.
    """

    def __init__(self, copies: SegmentCopies, tiers: SegmentTiers) -> None:
        self._copies, self._index = copies, copies.index
        self._tiers = tiers

    def first(self, names: Sequence[str]) -> list[str]:
        """Return the first segments of a prompt whose full KV requests may share.

        Args:
            names: Names of the prompt's whole segments.
        """
        found: list[str] = []
        for segment in map(self._index.find, names):
            split = segment.content.draft is not None or segment.residual is not None
            if split or segment.distrusted or segment.damaged:
                break
            found.append(segment.name)
        return found

    def get(self, name: str) -> RawImage | None:
        """Return a segment's full KV on the host, or None."""
        return cast("RawImage | None", self._index.find(name).images.get(Form.WHOLE))

    def open(
        self, scores: Mapping[str, torch.Tensor | None]
    ) -> dict[str, RawImage] | None:
        """Allocate full KV of segments, to be filled by the caller.

        Args:
            scores: Segments without full KV on the host, and the scores
                [L, H, SEGMENT] of their tokens; None without scores.

        Returns:
            Full KV by name; None without free host pages, and none was allocated.
        """
        opened: dict[str, RawImage] = {}
        for name, noted in scores.items():
            image = self._tiers.with_room(
                partial(self._copies.open_whole, name, SEGMENT, noted)
            )
            if image is None:
                self.drop(opened)
                return None
            opened[name] = image
        return opened

    def drop(self, names: Iterable[str]) -> None:
        """Free full KV on the host; see ``SegmentIndex.drop_image``."""
        for name in names:
            self._index.drop_image(name, Form.WHOLE)

    def settle(self, names: Sequence[str]) -> None:
        """Record the first segments of a prompt as full KV on the host.

        Args:
            names: Their names, in order.
        """
        for parent, name in zip((None, *names), names, strict=False):
            self._tiers.know(name, parent, self._tiers.on_host)
            self._index.update(name, self._tiers.on_host)
