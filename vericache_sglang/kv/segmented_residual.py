"""The complement of a prompt whose segments other prompts may share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.joined_images import (
    JoinedImages,
    one_behind_the_other,
)
from vericache_sglang.kv.residual import HostResidual, RawResidual

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from vericache_sglang.kv.host_image import Blocks, DraftParts


class SegmentedResidual(JoinedImages, HostResidual):
    """Complements of segments one behind the other, seen as one.

    Entry j of a head is still the j-th token that is not kept: segments follow each
    other in the prompt, and in each all heads drop equally many tokens.

    Args:
        segments: One complement per segment, in prompt order; at least one.
    """

    noun = HostResidual.noun

    def __init__(self, segments: Sequence[RawResidual]) -> None:
        super().__init__(segments)
        self.segments = tuple(segments)

    def describe(self, exact: torch.Tensor, coded: torch.Tensor) -> None:
        """Segments are described one by one, when they are made.

        Raises:
            InvariantError: Always.
        """
        raise InvariantError("a segmented complement is described by its segments")

    def blocks(self, layer: int, drafts: DraftParts | None) -> Blocks:
        """See ``HostResidual.blocks``; views, those of each segment in order."""
        return one_behind_the_other(
            segment.blocks(layer, drafts) for segment in self.segments
        )

    def equals(self, other: HostResidual) -> bool:
        """See ``HostResidual.equals``: requests share segments, not the whole."""
        return False
