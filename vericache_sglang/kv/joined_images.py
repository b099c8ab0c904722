"""Concatenated host images, so that one transfer fills or reads them all."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

from vericache_sglang.kv.host_image import HostImage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vericache_sglang.kv.host_image import Blocks


class JoinedImages(HostImage):
    """Images with the same number of layers, read as one; it owns no memory.

    Args:
        parts: In the order of their entries; at least one.
    """

    noun = "host image of several"

    def __init__(self, parts: Sequence[HostImage]) -> None:
        super().__init__(parts[0].layers)
        self._joined = tuple(parts)

    @property
    def slots(self) -> int:
        """See ``HostImage.slots``."""
        return sum(part.slots for part in self._joined)

    @property
    def members(self) -> tuple[HostImage, ...]:
        """See ``HostImage.members``."""
        return tuple(member for part in self._joined for member in part.members)

    def sides(self, layer: int) -> Blocks:
        """See ``HostImage.sides``."""
        return concatenated(part.sides(layer) for part in self._joined)

    def outgoing(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """See ``HostImage.outgoing``; each part encodes its own entries."""
        counts = [part.slots for part in self._joined]
        if len(keys) != sum(counts):
            return (keys, values), None  # ``receive`` refuses them
        rows = zip(keys.split(counts), values.split(counts), strict=True)
        found = [
            part.outgoing(layer, *own)
            for part, own in zip(self._joined, rows, strict=True)
        ]
        sizes = [each for _, each in found if each is not None]
        if not sizes:
            return (keys, values), None
        return [part for parts, _ in found for part in parts], torch.cat(sizes)

    def receive(
        self, layer: int, parts: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See ``HostImage.receive``; with ``sizes`` there is one for every part."""
        if not sizes:
            yield from super().receive(layer, parts, sizes)
            return
        each = len(parts) // len(self._joined)
        for i, (part, size) in enumerate(zip(self._joined, sizes, strict=True)):
            own = parts[i * each : (i + 1) * each]
            yield from part.receive(layer, own, [size])

    @property
    def nbytes_layer(self) -> int:
        """See ``HostImage.nbytes_layer``."""
        return sum(part.nbytes_layer for part in self._joined)

    @property
    def nbytes(self) -> int:
        """See ``HostImage.nbytes``; the sum over its parts."""
        return sum(part.nbytes for part in self._joined)

    @property
    def checksums(self) -> tuple[int | None, ...]:
        """Checksums of every layer of every part."""
        return tuple(value for part in self._joined for value in part.checksums)

    @property
    def sealed(self) -> bool:
        """Whether every layer of every part is sealed."""
        return all(part.sealed for part in self._joined)

    def seal(self, layer: int) -> None:
        """See ``HostImage.seal``."""
        for part in self._joined:
            part.seal(layer)

    def verify(self, layer: int) -> None:
        """See ``HostImage.verify``."""
        for part in self._joined:
            part.verify(layer)

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return tuple(part for each in self._joined for part in each._parts(layer))


def concatenated(found: Iterable[Blocks]) -> Blocks:
    """Concatenate the blocks of several images."""
    keys, values = zip(*found, strict=True)
    return list(chain(*keys)), list(chain(*values))
