"""KV of a cached segment off the radix tree: draft KV in slots, images on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vericache_sglang.errors import TransferError
from vericache_sglang.kv.host_image import RawImage

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from vericache_sglang.kv.host_image import Shapes
    from vericache_sglang.kv.host_pages import HostPagePool


@dataclass(frozen=True, slots=True, eq=False)
class SegmentDraft:
    """Draft KV of one segment: n exact tokens per layer and head, or c packed ones.

    Attributes:
        slots: Slots of the KV entries, [n] int64, or of the codes; in whole pages.
        kept: [L, H, n] int32 on the pool's device, positions of the exact tokens in the
            segment.
        coded: [L, H, c] int32, likewise, of the packed ones; None without a codec.
    """

    slots: torch.Tensor
    kept: torch.Tensor
    coded: torch.Tensor | None = None

    @property
    def packed(self) -> torch.Tensor:
        """[L, H, c] int32, positions of the packed tokens; c is 0 without a codec."""
        return self.kept[..., :0] if self.coded is None else self.coded

    @property
    def where(self) -> dict[str, torch.Tensor]:
        """The positions of its tokens, by their name in host images."""
        return {"kept": self.kept} if self.coded is None else {"coded": self.coded}


class SegmentImage(RawImage):
    """Tensors of a cached segment on the host: KV entries, positions or scores."""

    noun = "segment"

    @classmethod
    def allocated(cls, shapes: Shapes, pool: HostPagePool) -> SegmentImage | None:
        """Return an image to be filled; None without free pages."""
        try:
            return cls(shapes, pool)
        except TransferError:
            return None

    @classmethod
    def copied(
        cls, tensors: Mapping[str, torch.Tensor], pool: HostPagePool
    ) -> SegmentImage | None:
        """Return a sealed copy of tensors, bit by bit; None without free pages.

        Args:
            tensors: [L, ...] by field name; any dtype, strides and device.
            pool: Pool of its pages.
        """
        image = cls.allocated(shapes_of_tensors(tensors), pool)
        if image is None:
            return None
        try:
            for field, tensor in tensors.items():
                image.tensors[field].write(tensor.cpu())
        except BaseException:
            image.free()
            raise
        for layer in range(image.layers):
            image.seal(layer)
        return image


def shapes_of_tensors(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    """Return dtype and shape of tensors by name."""
    return {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
