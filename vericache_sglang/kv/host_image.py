"""KV images in host memory, with a checksum per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
import xxhash

from vericache_kernels.head_entries import put_entries
from vericache_sglang.compression.budget import residual_indices
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.host_pages import (
    HostPagePool,
    HostTensor,
    aligned,
    gathered_on,
)
from vericache_sglang.kv.split_layers import as_bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from vericache_kernels.join_planes import DraftPlanes
    from vericache_sglang.compression.codecs.base import PartSpec
    from vericache_sglang.kv.geometry import KVGeometry
    from vericache_sglang.kv.host_pages import HostPages

    Buffers = tuple[torch.Tensor, torch.Tensor]
    Blocks = tuple[list[torch.Tensor], list[torch.Tensor]]
    """A layer's keys [k, H, D] and values [k, H, Dv] on the host, each in pieces."""
    Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    """Dtype and shape [L, ...] of tensors by name."""


class DraftReader(Protocol):
    """Reads a request's packed draft KV in the KV pool."""

    def __call__(self, layer: int) -> list[PartSpec]:
        """Return one layer's packed draft KV by segment, to be joined on the host."""

    def planes(self, layer: int) -> DraftPlanes:
        """Return it in the kernel's layout; copies, made on the caller's stream."""

    def of(self, segment: int) -> DraftReader:
        """Return a reader of one segment alone."""

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep its slot indices alive for work on another stream."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyTarget:
    """Slots of the pool that receive an image's entries; tensors on its device.

    Attributes:
        slots: [n] int64, unique. Without ``kept``, entry j goes to ``slots[j]``.
            Otherwise they are a whole prompt's: token i goes to ``slots[i]``.
        kept: [L, H, k] integers, the tokens that are exact on the device.
        exact: [k] int64, the slots of these tokens; may be among ``slots``.
    """

    slots: torch.Tensor
    kept: torch.Tensor | None = None
    exact: torch.Tensor | None = None

    def index(self, layer: int) -> torch.Tensor | None:
        """Return [H, m] int64: the index into ``slots`` of entry j of head h.

        None: entry j of every head goes to ``slots[j]``.
        """
        if self.kept is None:
            return None
        return residual_indices(self.kept[layer].to(torch.int64), len(self.slots))

    @contextmanager
    def joined(self, layer: int, buffers: Buffers) -> Iterator[None]:
        """Move a layer's exact entries; the body of the context writes the others."""
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
    ) -> None:
        """Write all entries of a layer on the caller's stream.

        Args:
            layer: Layer index.
            buffers: As for ``HostImage.place``.
            rows: Keys [n, H, D] and values as integers, on the pool's device.
        """
        own, index = [as_bits(buffer) for buffer in buffers], self.index(layer)
        if index is not None:
            put_entries(own, index, rows, self.slots)
            return
        for buffer, entries in zip(own, rows, strict=True):
            if buffer.device.type == "cpu":
                # numpy: a transfer thread must not start OpenMP threads.
                buffer.numpy()[self.slots.numpy()] = entries.numpy()
            else:
                buffer.index_copy_(0, self.slots, entries)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep its tensors alive for work on another stream."""
        for tensor in (self.slots, self.kept, self.exact):
            if tensor is not None:
                tensor.record_stream(stream)


class HostImage(ABC):
    """KV copied from the device. A layer is valid from its ``seal`` on.

    Args:
        layers: L.

    Attributes:
        pages: Host pages of its tensors; None: it has no memory of its own.
        filling: The running job that writes it; None if there is none.
    """

    noun: ClassVar[str] = "host image"

    def __init__(self, layers: int) -> None:
        self._checksums: list[int | None] = [None] * layers
        self.pages: HostPages | None = None
        self.filling: Future[None] | None = None

    @property
    def layers(self) -> int:
        """L."""
        return len(self._checksums)

    @property
    @abstractmethod
    def slots(self) -> int:
        """Tokens it holds; each takes one slot once loaded."""

    @property
    @abstractmethod
    def nbytes_layer(self) -> int:
        """Bytes of one layer that cross the link."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all its tensors."""

    def sides(self, layer: int) -> Blocks:
        """Return views of a layer's entries; empty if they must be decoded first."""
        return [], []

    @property
    def members(self) -> tuple[HostImage, ...]:
        """The images that own the memory; default: itself."""
        return (self,)

    @property
    def page_lists(self) -> tuple[HostPages | None, ...]:
        """The pages of all its members."""
        return tuple(member.pages for member in self.members)

    @property
    def held_bytes(self) -> int:
        """Bytes of its pages, unwritten ones included."""
        return self.pages.nbytes if self.pages else 0

    @property
    def checksums(self) -> tuple[int | None, ...]:
        """xxh3 (64 bits) of each layer, None where it is not sealed."""
        return tuple(self._checksums)

    @property
    def sealed(self) -> bool:
        """Whether every layer is sealed."""
        return None not in self._checksums

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy one layer in, in the caller's thread, and seal it.

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
        """Return the tensors of a layer that cross the link; does not synchronise.

        Args:
            layer: Layer index.
            keys: As for ``write``.
            values: As for ``write``.

        Returns:
            Tensors on the device of ``keys``; and the counts [*] int32 that determine
            their size, None where it is fixed.
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
            InvariantError: The number of entries is not ``slots``.
        """
        if len(parts[0]) != self.slots:
            raise InvariantError(f"{len(parts[0])} entries for {self.slots} slots")
        for blocks, part in zip(self.sides(layer), parts, strict=True):
            first = 0
            for own in map(as_bits, blocks):
                yield own, as_bits(part)[first : first + len(own)]
                first += len(own)

    def place(
        self,
        layer: int,
        buffers: Buffers,
        target: CopyTarget,
        drafts: DraftReader | None,
    ) -> None:
        """Write a layer's entries into the pool, on the caller's stream.

        Args:
            layer: Layer index; verified.
            buffers: Keys [slots of the pool, H, D] and values of the layer.
            target: Slots that receive them.
            drafts: Draft KV, for residual KV that must be joined with it.
        """
        device = buffers[0].device
        sides = [list(map(as_bits, blocks)) for blocks in self.sides(layer)]
        rows = [gathered_on(device, blocks) for blocks in sides]
        target.write(layer, buffers, rows)

    def settle(self) -> None:
        """Free the pages a sealed image does not need; default: none."""

    def free(self) -> None:
        """Free its pages; a copy that holds them delays their reuse until it ends.

        Raises:
            InvariantError: They were freed before.
        """
        if self.pages:
            self.pages.free()

    def seal(self, layer: int) -> None:
        """Checksum one layer after its last write."""
        self._checksums[layer] = self._digest(layer)

    def verify(self, layer: int) -> None:
        """Compare one layer with its checksum; waits for a running save.

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
        """What the checksum of a layer covers, in this order: views, uint8."""

    def _take(self, pool: HostPagePool | None, nbytes: int) -> HostPages:
        """Allocate the image's memory.

        Args:
            pool: Pool to allocate from; None: outside any budget, and not pinned.
            nbytes: Bytes of all its tensors, as laid out.

        Raises:
            TransferError: The pool has no room.
        """
        if pool is None:
            pool = HostPagePool(aligned(nbytes), max(1, aligned(nbytes)), pinned=False)
        pages = pool.take(nbytes)
        if pages is None:
            raise TransferError(
                f"{nbytes} bytes exceed the {pool.free_bytes} left of the "
                f"{pool.size} that --vericache-host-gb allows"
            )
        self.pages = pages
        return pages

    def _digest(self, layer: int) -> int:
        digest = xxhash.xxh3_64()
        for tensor in self._parts(layer):
            digest.update(tensor.numpy().data)
        return digest.intdigest()


def shapes_of(
    geometry: KVGeometry, slots: int, dtype: torch.dtype, kept: int | None = None
) -> Shapes:
    """Return dtype and shape of a raw image's tensors.

    Args:
        geometry: Shapes of the pool they come from.
        slots: S.
        dtype: Dtype of the pool.
        kept: n, exact tokens whose positions belong to residual KV; None: no residual.
    """
    row = (geometry.layers, slots, geometry.kv_heads)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "keys": (dtype, (*row, geometry.head_dim)),
        "values": (dtype, (*row, geometry.v_head_dim)),
    }
    if kept is not None:
        shapes["kept"] = (torch.int32, (geometry.layers, geometry.kv_heads, kept))
    return shapes


def laid_out(shapes: Shapes) -> tuple[dict[str, int], int]:
    """Lay tensors out back to back, so that no page boundary cuts an entry.

    Returns:
        The first byte of each, and the total bytes.
    """
    starts, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        if name in ("keys", "values"):
            entry = prod(shape[2:]) * dtype.itemsize
            end = -(-end // entry) * entry
        else:
            end = aligned(end)
        starts[name] = end
        end += prod(shape) * dtype.itemsize
    return starts, end


class RawImage(HostImage):
    """Entries in the pool's dtype, and the tensors that belong to them.

    Args:
        shapes: L layers, see ``shapes_of``; further tensors are allowed. Keys and
            values may be missing.
        pool: Where its memory comes from; None: outside any budget.

    Attributes:
        tensors: By name.

    Raises:
        TransferError: The pool has no room; nothing was allocated.
    """

    def __init__(self, shapes: Shapes, pool: HostPagePool | None = None) -> None:
        super().__init__(next(iter(shapes.values()))[1][0])
        starts, nbytes = laid_out(shapes)
        pages = self._take(pool, nbytes)
        self.tensors = {
            name: HostTensor(pages, dtype, shape, starts[name])
            for name, (dtype, shape) in shapes.items()
        }

    @property
    def slots(self) -> int:
        """S."""
        return self.tensors["keys"].shape[1] if "keys" in self.tensors else 0

    def sides(self, layer: int) -> Blocks:
        """See ``HostImage.sides``."""
        return self.tensors["keys"].rows(layer), self.tensors["values"].rows(layer)

    @property
    def nbytes_layer(self) -> int:
        """See ``HostImage.nbytes_layer``; of keys and values."""
        both = (self.tensors["keys"], self.tensors["values"])
        return sum(side.nbytes for side in both) // self.layers

    @property
    def nbytes(self) -> int:
        """See ``HostImage.nbytes``."""
        return sum(each.nbytes for each in self.tensors.values())

    def same_bits(self, other: RawImage) -> bool:
        """Return whether both hold the same tensors, bit by bit; reads all of them."""
        own, others = self.tensors, other.tensors
        if any(own[name].shape != others[name].shape for name in own):
            return False
        return all(
            torch.equal(as_bits(mine), as_bits(theirs))
            for name in own
            for mine, theirs in zip(own[name], others[name], strict=True)
        )

    @property
    def keys(self) -> torch.Tensor:
        """[L, S, H, D]; a view if its pages are contiguous, else a copy."""
        return self.tensors["keys"].read()

    @property
    def values(self) -> torch.Tensor:
        """[L, S, H, Dv], as ``keys``."""
        return self.tensors["values"].read()

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        return tuple(
            block for each in self.tensors.values() for block in each.raw(layer)
        )
