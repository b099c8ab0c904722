"""Residual KV that is picked, head by head, from full KV that prompts share."""

from __future__ import annotations

from math import prod
from threading import local
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vericache_kernels.head_entries import pick_entries, put_entries
from vericache_sglang.compression.budget import residual_indices
from vericache_sglang.compression.placed import placed
from vericache_sglang.errors import InvariantError
from vericache_sglang.kv.host_image import CopyTarget
from vericache_sglang.kv.joined_images import JoinedImages
from vericache_sglang.kv.residual import HostResidual
from vericache_sglang.kv.split_layers import as_bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vericache_sglang.kv.host_image import Blocks, Buffers, DraftReader, RawImage
    from vericache_sglang.kv.host_pages import HostPagePool

IN_LAUNCH = 8192
"""Most head entries that one kernel launch reads from the host: 256 programs at most,
so that a forward keeps most of the device while they wait for the link."""

SIDES = ("keys", "values")


class Scratch(local):
    """Memory of one thread, used again: touching new pages costs more than a copy."""

    def __init__(self) -> None:
        self._memory = [np.empty(0, dtype=np.uint8) for _ in SIDES]

    def array(
        self, side: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> np.ndarray[Any, Any]:
        """Return an array of undefined content, in the memory of the one before."""
        nbytes = prod(shape) * dtype.itemsize
        if self._memory[side].nbytes < nbytes:
            self._memory[side] = np.empty(nbytes, dtype=np.uint8)
        return self._memory[side][:nbytes].view(dtype).reshape(shape)


SCRATCH = Scratch()


class PickedResidual(JoinedImages, HostResidual):
    """The entries of consecutive full images that one request's draft KV lacks.

    The images may serve other requests, whose draft KV lacks other entries. Only the
    picked entries cross the link: on a GPU a kernel reads them in page-locked memory.

    Args:
        images: Full KV of the prompt's B tokens in whole pages, in prompt order.
        kept: [L, H, n] int32 on the pool's device, positions in the prompt of the
            tokens in the draft KV, ascending.
        pool: Pool of all pages of the images.
        dtype: Dtype of the entries.
    """

    noun = HostResidual.noun

    def __init__(
        self,
        images: Sequence[RawImage],
        kept: torch.Tensor,
        pool: HostPagePool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(images)
        self._images = tuple(images)
        self._exact, self._buffer, self._dtype = kept, pool.buffer, dtype
        # Pages do not move: by layer, 16 bytes a token.
        self._places: dict[int, list[torch.Tensor]] = {}

    @property
    def slots(self) -> int:
        """See ``HostImage.slots``; B - n."""
        return self._tokens - self._exact.shape[2]

    @property
    def _tokens(self) -> int:
        return super().slots

    @property
    def nbytes_layer(self) -> int:
        """See ``HostImage.nbytes_layer``."""
        return super().nbytes_layer // self._tokens * self.slots

    def describe(self, exact: torch.Tensor, coded: torch.Tensor) -> None:
        """Not supported: the images hold every token.

        Raises:
            InvariantError: Always.
        """
        raise InvariantError("full KV that prompts share has no kept tokens")

    def sides(self, layer: int) -> Blocks:
        """See ``HostImage.sides``; empty, as entries are picked first."""
        return [], []

    def blocks(self, layer: int, drafts: DraftReader | None) -> Blocks:
        """See ``HostResidual.blocks``; valid until this thread's next call of it."""
        # numpy: a transfer thread must not start OpenMP threads.
        kept = self._exact[layer].numpy()
        missing = np.ones((len(kept), self._tokens), dtype=bool)
        np.put_along_axis(missing, kept.astype(np.int64), False, axis=1)
        tokens = missing.nonzero()[1].reshape(len(kept), -1).T
        found = []
        for side, (entries, places) in enumerate(self._entries(layer)):
            heads, dim = entries.shape[1:]
            rows = places.numpy()[tokens] * heads + np.arange(heads)
            source = as_bits(entries).view(-1, dim).numpy()
            picked = SCRATCH.array(side, (*rows.shape, dim), source.dtype)
            # In this mode numpy writes to ``out`` directly; no index is outside.
            source.take(rows, axis=0, out=picked, mode="clip")
            found.append([torch.from_numpy(picked).view(self._dtype)])
        return found[0], found[1]

    def place(
        self,
        layer: int,
        buffers: Buffers,
        target: CopyTarget,
        drafts: DraftReader | None,
    ) -> None:
        """See ``HostImage.place``; on a GPU a kernel picks the entries."""
        device = buffers[0].device
        if device.type == "cpu":
            rows = [as_bits(side) for (side,) in self.blocks(layer, drafts)]
            target.write(layer, buffers, rows)
            return
        self._exact.record_stream(torch.cuda.current_stream())
        index = residual_indices(self._exact[layer], self._tokens)
        sides = [
            (as_bits(entries), placed(places, device))
            for entries, places in self._entries(layer)
        ]
        step = max(1, IN_LAUNCH // len(index))
        for first in range(0, self.slots, step):
            some = index[:, first : first + step]
            rows = [pick_entries([side], some, places)[0] for side, places in sides]
            if target.kept is None:
                part = CopyTarget(target.slots[first : first + step])
                part.write(layer, buffers, rows)
            else:
                own = [as_bits(buffer) for buffer in buffers]
                put_entries(own, some, rows, target.slots)

    def equals(self, other: HostResidual) -> bool:
        """See ``HostResidual.equals``."""
        if not isinstance(other, PickedResidual) or self.checksums != other.checksums:
            return False
        return (
            len(self._images) == len(other._images)
            and all(
                one is two or one.same_bits(two)
                for one, two in zip(self._images, other._images, strict=True)
            )
            and torch.equal(self._exact, other._exact)
        )

    def _entries(self, layer: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield all host pages as keys [N, H, D], then as values, and where ours are.

        Yields:
            The pages, and [B] int64: the index of each token of the layer in them.
        """
        if layer not in self._places:
            self._places[layer] = [self._find(layer, name) for name in SIDES]
        for name, places in zip(SIDES, self._places[layer], strict=True):
            entry = self._images[0].tensors[name].shape[2:]
            yield self._buffer.view(self._dtype).view(-1, *entry), places

    def _find(self, layer: int, name: str) -> torch.Tensor:
        sides = [image.tensors[name] for image in self._images]
        size = prod(sides[0].shape[2:])
        views = [rows for side in sides for rows in side.rows(layer)]
        starts = (view.storage_offset() // size for view in views)
        return torch.cat(
            [
                torch.arange(first, first + len(view))
                for first, view in zip(starts, views, strict=True)
            ]
        )
