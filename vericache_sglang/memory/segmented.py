"""The complement of a prompt whose segments other prompts may share."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from vericache_sglang.errors import InvariantError
from vericache_sglang.memory.complement import Complement, DraftParts, RawComplement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.memory.host_image import Entries


class SegmentedComplement(Complement):
    """Complements of segments one behind the other, seen as one.

    Entry j of a head is still the j-th token that is not kept: segments follow each
    other in the prompt, and in each all heads drop equally many tokens. It owns no
    memory.

    Args:
        segments: One complement per segment, in prompt order; at least one.
    """

    def __init__(self, segments: Sequence[RawComplement]) -> None:
        super().__init__(segments[0].layers)
        self.segments = tuple(segments)

    @property
    def slots(self) -> int:
        """See ``HostImage.slots``."""
        return sum(segment.slots for segment in self.segments)

    @property
    def images(self) -> tuple[Entries, ...]:
        """See ``HostImage.images``; one per segment."""
        return self.segments

    @property
    def nbytes_layer(self) -> int:
        """See ``HostImage.nbytes_layer``."""
        return sum(segment.nbytes_layer for segment in self.segments)

    @property
    def nbytes(self) -> int:
        """See ``HostImage.nbytes``; the segments' own."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def checksums(self) -> tuple[int | None, ...]:
        """Of every layer of every segment."""
        return tuple(value for each in self.segments for value in each.checksums)

    @property
    def sealed(self) -> bool:
        """Every layer of every segment is sealed."""
        return all(segment.sealed for segment in self.segments)

    def describe(self, layer: int, exact: torch.Tensor, coded: torch.Tensor) -> None:
        """Segments are described one by one, when they are made.

        Raises:
            InvariantError: Always.
        """
        raise InvariantError("a segmented complement is described by its segments")

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See ``HostImage.write``; every segment takes its own entries."""
        bounds = [0]
        for segment in self.segments:
            bounds.append(bounds[-1] + segment.slots)
        if bounds[-1] != keys.shape[0]:
            raise InvariantError(f"{keys.shape[0]} entries for {bounds[-1]} slots")
        for segment, (start, stop) in zip(self.segments, pairwise(bounds), strict=True):
            segment.write(layer, keys[start:stop], values[start:stop])

    def seal(self, layer: int) -> None:
        """See ``HostImage.seal``."""
        for segment in self.segments:
            segment.seal(layer)

    def verify(self, layer: int) -> None:
        """See ``HostImage.verify``."""
        for segment in self.segments:
            segment.verify(layer)

    def entries(
        self, layer: int, drafts: DraftParts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Complement.entries``; copies."""
        pairs = self.blocks(layer, drafts)
        return torch.cat([k for k, _ in pairs]), torch.cat([v for _, v in pairs])

    def blocks(
        self, layer: int, drafts: DraftParts
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """See ``Complement.blocks``; views, one pair per segment."""
        return [segment.entries(layer, drafts) for segment in self.segments]

    def equals(self, other: Complement) -> bool:
        """See ``Complement.equals``: requests share segments, not the whole."""
        return False

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return tuple(part for each in self.segments for part in each._parts(layer))
