"""Residual KV of a prompt whose segments other prompts may share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.host_image import CopyTarget
from vericache_sglang.kv.joined_images import (
    JoinedImages,
    concatenated,
)
from vericache_sglang.kv.residual import HostResidual

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from vericache_sglang.kv.host_image import Blocks, Buffers, DraftReader


class SegmentedResidual(JoinedImages, HostResidual):
    """Residual KV of consecutive segments, read as one.

    Entry j of a head is still the j-th token that is not kept: segments are in prompt
    order, and within each all heads drop the same number of tokens.

    Args:
        segments: Residual KV of each segment, in prompt order; at least one.
    """

    noun = HostResidual.noun

    def __init__(self, segments: Sequence[HostResidual]) -> None:
        super().__init__(segments)
        self.segments = tuple(segments)

    def describe(self, exact: torch.Tensor, coded: torch.Tensor) -> None:
        """Not supported: each segment is described when it is created.

        Raises:
            InvariantError: Always.
        """
        raise InvariantError("a segmented residual KV is described by its segments")

    def blocks(self, layer: int, drafts: DraftReader | None) -> Blocks:
        """See ``HostResidual.blocks``; those of each segment in order."""
        return concatenated(
            segment.blocks(layer, None if drafts is None else drafts.of(i))
            for i, segment in enumerate(self.segments)
        )

    def place(
        self,
        layer: int,
        buffers: Buffers,
        target: CopyTarget,
        drafts: DraftReader | None,
    ) -> None:
        """See ``HostImage.place``; packed segments have no exact entries."""
        if drafts is None:
            super().place(layer, buffers, target, None)
            return
        first = 0
        for i, segment in enumerate(self.segments):
            own = CopyTarget(target.slots[first : first + segment.slots])
            segment.place(layer, buffers, own, drafts.of(i))
            first += segment.slots

    def equals(self, other: HostResidual) -> bool:
        """See ``HostResidual.equals``: requests share single segments only."""
        return False
