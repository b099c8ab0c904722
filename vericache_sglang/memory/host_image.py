"""KV in host memory: what every layer holds there, and a checksum of each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import xxhash

from vericache_kernels.head_entries import put_entries
from vericache_sglang.compression.budget import complement_indices
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.arena import Arena, layout
from vericache_sglang.memory.free_spans import rounded
from vericache_sglang.memory.splitting import as_bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from vericache_kernels.join_planes import DraftPlanes
    from vericache_sglang.compression.codecs.base import Part
    from vericache_sglang.memory.arena import Extent
    from vericache_sglang.memory.geometry import KVGeometry

    Buffers = tuple[torch.Tensor, torch.Tensor]


class DraftParts(Protocol):
    """Reads a request's packed draft part where it is, in the KV pool."""

    def __call__(self, layer: int) -> list[Part]:
        """Return one layer's draft parts, segment by segment; for the host."""

    def planes(self, layer: int) -> DraftPlanes:
        """Return them as a kernel reads them; copies, made on the caller's stream."""

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep what it reads by for the work of another stream."""


class Entries(Protocol):
    """Entries in one piece of host memory, as a copy finds or leaves them."""

    extent: Extent | None

    @property
    def slots(self) -> int:
        """S."""

    @property
    def keys(self) -> torch.Tensor:
        """[L, S, H, D], pinned where CUDA is present; a view."""

    @property
    def values(self) -> torch.Tensor:
        """[L, S, H, Dv], as ``keys``."""


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Slots of the pool that receive an image's entries; tensors are on its device.

    Attributes:
        slots: [n] int64, unique. Without ``kept`` entry j goes to slot j. Else they are
            a whole prompt's, token i goes to slot i.
        kept: [L, H, k] integers, the tokens that are exact on the device.
        exact: [k] int64, the slots where these are; may be among ``slots``.
    """

    slots: torch.Tensor
    kept: torch.Tensor | None = None
    exact: torch.Tensor | None = None

    def index(self, layer: int) -> torch.Tensor | None:
        """Return [H, m] int64: which of ``slots`` entry j of head h goes to.

        None: entry j of every head goes to slot j.
        """
        if self.kept is None:
            return None
        return complement_indices(self.kept[layer].to(torch.int64), len(self.slots))

    @contextmanager
    def joined(self, layer: int, buffers: Buffers) -> Iterator[None]:
        """Move the exact entries of a layer, around the writing of the others."""
        if self.kept is None or self.exact is None:
            yield
            return
        own = [as_bits(buffer) for buffer in buffers]
        rows = [buffer.index_select(0, self.exact) for buffer in own]
        yield
        put_entries(own, self.kept[layer].to(torch.int64), rows, self.slots)

    def write(
        self,
        layer: int,
        buffers: Buffers,
        rows: Sequence[torch.Tensor],
        first: int = 0,
    ) -> None:
        """Write consecutive entries of a layer on the caller's stream.

        Args:
            layer: Layer index.
            buffers: As for ``HostImage.place``.
            rows: Keys [k, H, D] and values as integers, on the pool's device.
            first: Number of the first entry.
        """
        own = [as_bits(buffer) for buffer in buffers]
        which, index = slice(first, first + len(rows[0])), self.index(layer)
        if index is not None:
            put_entries(own, index[:, which], rows, self.slots)
            return
        slots = self.slots[which]
        for buffer, entries in zip(own, rows, strict=True):
            if buffer.device.type == "cpu":
                # No OpenMP threads beside the forward's: a link's thread may write.
                buffer.numpy()[slots.numpy()] = entries.numpy()
            else:
                buffer.index_copy_(0, slots, entries)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep its tensors for the work of another stream."""
        for tensor in (self.slots, self.kept, self.exact):
            if tensor is not None:
                tensor.record_stream(stream)


class HostImage(ABC):
    """Something that left the device. A layer is trusted from its ``seal`` on.

    Args:
        layers: L.

    Attributes:
        extent: Where its tensors are; None: it has no memory of its own. Held for as
            long as the image lives: a copy on its way reads and writes views of it.
        filling: The job of a thread that writes it; None: nothing does.
    """

    noun: ClassVar[str] = "host image"

    def __init__(self, layers: int) -> None:
        self._checksums: list[int | None] = [None] * layers
        self.extent: Extent | None = None
        self.filling: Future[None] | None = None
        self._arena: Arena | None = None
        self._stays = True

    @property
    def layers(self) -> int:
        """L."""
        return len(self._checksums)

    @property
    @abstractmethod
    def slots(self) -> int:
        """Tokens it stands for, a slot each when they are back."""

    @property
    @abstractmethod
    def nbytes_layer(self) -> int:
        """Bytes of one layer: what crosses the link for it."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all its tensors."""

    @property
    def images(self) -> tuple[Entries, ...]:
        """Where its entries lie, one behind the other; nowhere: it makes them."""
        return ()

    @property
    def members(self) -> tuple[HostImage, ...]:
        """The images that own the memory; default: itself."""
        return (self,)

    @property
    def extents(self) -> tuple[Extent | None, ...]:
        """Where its bytes lie."""
        return tuple(member.extent for member in self.members)

    @property
    def held_bytes(self) -> int:
        """Bytes of the arena it takes, alignment and what is not written included."""
        return self.extent.size if self.extent else 0

    @property
    def checksums(self) -> tuple[int | None, ...]:
        """xxh3 (64 bits) of each layer, None where it is not sealed."""
        return tuple(self._checksums)

    @property
    def sealed(self) -> bool:
        """Every layer is sealed."""
        return None not in self._checksums

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take one layer in, in the caller's thread, and seal it.

        Args:
            layer: Layer index.
            keys: [slots, H, D] on any device.
            values: [slots, H, Dv].
        """
        parts, sizes = self.outgoing(layer, keys, values)
        known = [] if sizes is None else sizes.tolist()
        for target, source in self.receive(layer, parts, known):
            target.copy_(source)
        self.seal(layer)

    def outgoing(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """Return what of a layer crosses the link; the host waits for nothing.

        Args:
            layer: Layer index.
            keys: As for ``write``.
            values: As for ``write``.

        Returns:
            Tensors on the device of ``keys``; and the numbers [*] int32 on which their
            size depends, None where it does not.
        """
        return (keys, values), None

    def receive(
        self, layer: int, parts: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the copies that bring a layer to the host: (target, source).

        Args:
            layer: Layer index.
            parts: As ``outgoing`` returned them.
            sizes: Likewise, on the host.

        Raises:
            InvariantError: There are other than the image's slots.
        """
        if len(parts[0]) != self.slots:
            raise InvariantError(f"{len(parts[0])} entries for {self.slots} slots")
        first = 0
        for image in self.images:
            rows = slice(first, first + image.slots)
            for own, part in zip((image.keys, image.values), parts, strict=True):
                yield as_bits(own[layer]), as_bits(part)[rows]
            first = rows.stop

    def place(
        self, layer: int, buffers: Buffers, target: Target, drafts: DraftParts | None
    ) -> None:
        """Write a layer's entries into the pool, on the caller's stream.

        Args:
            layer: Verified.
            buffers: Keys [slots of the pool, H, D] and values of the layer.
            target: Where they go.
            drafts: The draft part, for complements that hold only what it lacks.
        """
        first = 0
        for image in self.images:
            pair = zip((image.keys, image.values), buffers, strict=True)
            rows = [
                as_bits(own[layer]).to(buffer.device, non_blocking=True)
                for own, buffer in pair
            ]
            target.write(layer, buffers, rows, first)
            first += image.slots

    def settle(self) -> None:
        """Give back what a sealed image does not need; default: nothing."""

    def free(self) -> None:
        """Give all its bytes back; a copy that holds the extent keeps them so long.

        Raises:
            InvariantError: That was done before.
        """
        if self.extent and self._arena:
            self._arena.give(self.extent)
            if self._stays:
                self.extent.release()

    def seal(self, layer: int) -> None:
        """Checksum one layer after its last write."""
        self._checksums[layer] = self._digest(layer)

    def verify(self, layer: int) -> None:
        """Compare one layer with its checksum; waits for a save that is under way.

        Raises:
            TransferError: The bytes changed since ``seal``, or there was none.
        """
        if self.filling is not None:
            wait([self.filling])
        sealed = self._checksums[layer]
        if sealed is None or self._digest(layer) != sealed:
            raise TransferError(f"{self.noun} checksum differs in layer {layer}")

    @abstractmethod
    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        """What the checksum of a layer covers, in this order."""

    def _take(self, arena: Arena | None, nbytes: int) -> Extent:
        """Take the image's memory, held.

        Args:
            arena: Where from; None: outside any budget, and not pinned.
            nbytes: Of all its tensors, as laid out.

        Raises:
            TransferError: There is no room.
        """
        if arena is None:
            arena = Arena(rounded(nbytes), pinned=False)
        extent = arena.take(nbytes, held=True)
        if extent is None:
            raise TransferError(
                f"{nbytes} bytes exceed the {arena.free_bytes} left of the "
                f"{arena.size} that --vericache-host-gb allows, or every piece of them"
            )
        self._arena, self.extent = arena, extent
        return extent

    def _view(
        self, dtype: torch.dtype, shape: Sequence[int], offset: int
    ) -> torch.Tensor:
        """Return one of its tensors, where it is now.

        Raises:
            InvariantError: It was freed, or has no memory of its own.
        """
        if self.extent is None:
            raise InvariantError(f"a {self.noun} without memory is used")
        return self.extent.view(dtype, shape, offset)

    def _digest(self, layer: int) -> int:
        digest = xxhash.xxh3_64()
        for tensor in self._parts(layer):
            digest.update(tensor.view(torch.uint8).numpy().data)
        return digest.intdigest()


def raw_layout(
    geometry: KVGeometry, slots: int, kept: int = 0
) -> tuple[list[int], int]:
    """Lay entries out, and kept positions behind them.

    Args:
        geometry: Shapes of the pool.
        slots: S.
        kept: n, exact tokens of a complement.

    Returns:
        The first byte of keys, values and positions, and the bytes of all.
    """
    heads = geometry.layers * geometry.kv_heads
    size = heads * slots * geometry.element_bytes
    sizes = (size * geometry.head_dim, size * geometry.v_head_dim)
    return layout((*sizes, heads * kept * torch.int32.itemsize))


class RawImage(HostImage):
    """Entries as they were on the device.

    Shapes: L layers, S slots, H KV heads, D and Dv head dims of keys and values.

    Args:
        geometry: Shapes of the pool the entries come from.
        slots: S.
        dtype: Dtype of the pool.
        arena: Where its memory comes from; None: outside any budget.
        kept: n, positions of every layer and head behind the entries.

    Raises:
        TransferError: The arena has no room; nothing was allocated.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        slots: int,
        dtype: torch.dtype,
        arena: Arena | None = None,
        kept: int = 0,
    ) -> None:
        super().__init__(geometry.layers)
        self._geometry = geometry
        self._slots = slots
        self._dtype = dtype
        self._offsets, nbytes = raw_layout(geometry, slots, kept)
        self._take(arena, nbytes)

    @property
    def slots(self) -> int:
        """S."""
        return self._slots

    @property
    def images(self) -> tuple[Entries, ...]:
        """See ``HostImage.images``."""
        return (self,)

    @property
    def nbytes_layer(self) -> int:
        """See ``HostImage.nbytes_layer``."""
        return self._slots * self._geometry.token_bytes // self.layers

    @property
    def nbytes(self) -> int:
        """See ``HostImage.nbytes``."""
        return self._slots * self._geometry.token_bytes

    @property
    def keys(self) -> torch.Tensor:
        """[L, S, H, D] in the pool's dtype, pinned where CUDA is present; a view."""
        return self._entries(self._geometry.head_dim, self._offsets[0])

    @property
    def values(self) -> torch.Tensor:
        """[L, S, H, Dv], as ``keys``."""
        return self._entries(self._geometry.v_head_dim, self._offsets[1])

    def stay(self, where_it_is: bool) -> None:
        """Say whether its bytes stay where they are, as they do from the start.

        An image no transfer reads or writes may let the arena move it: ``keys`` and
        the like are always right, but good only until the arena's next call.
        """
        if self.extent and where_it_is != self._stays:
            (self.extent.hold if where_it_is else self.extent.release)()
            self._stays = where_it_is

    def _entries(self, dim: int, offset: int) -> torch.Tensor:
        shape = (self.layers, self._slots, self._geometry.kv_heads, dim)
        return self._view(self._dtype, shape, offset)

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.keys[layer], self.values[layer]
