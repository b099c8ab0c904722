"""Residual KV of ``split-planes``: the bits that the draft KV lacks, losslessly."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from vericache_kernels.head_entries import put_entries
from vericache_kernels.join_planes import PlaneTarget as PlanesTarget
from vericache_kernels.join_planes import (
    Residuals,
    SplitPlanesStep,
    join_planes,
)
from vericache_sglang.compression.budget import residual_indices
from vericache_sglang.compression.codecs.base import PartShape as PartShape
from vericache_sglang.compression.codecs.base import PartSpec
from vericache_sglang.compression.codecs.floats import FORMATS
from vericache_sglang.compression.codecs.packing import packed_bytes
from vericache_sglang.compression.codecs.residual_planes import (
    encode_residuals,
    escape_bytes,
)
from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.kv.host_pages import (
    HOST,
    HostTensor,
    aligned,
    gathered_on,
    layout,
)
from vericache_sglang.kv.residual import HostResidual
from vericache_sglang.kv.segment_length import segment_bounds
from vericache_sglang.kv.split_layers import as_bits, pick, put

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.compression.codecs.split_planes import SplitPlanes
    from vericache_sglang.kv.geometry import KVGeometry
    from vericache_sglang.kv.host_image import Blocks, Buffers, CopyTarget, DraftReader
    from vericache_sglang.kv.host_pages import HostPagePool


class Fields(NamedTuple):
    """Byte offsets in a layer's region; the escapes follow at ``end``.

    Attributes:
        dropped: First byte of the dropped keys [d, H, D], and of the values.
        rest: First byte of the other mantissa bits of keys and of values, both
            segment after segment.
        width: Bytes of one token of one head in ``rest``, of keys and of values.
        end: Bytes of all fields.
    """

    dropped: tuple[int, int]
    rest: tuple[int, int]
    width: tuple[int, int]
    end: int


class PlaneResidual(HostResidual):
    """Residual planes of packed tokens, and entries of dropped tokens.

    It is joined with draft KV, of a request or of a segment that prompts share. A layer
    is one byte range, so one copy moves it in either direction. Its length depends on
    the number of escapes, which is known after encoding.

    Args:
        geometry: Shapes of the pool.
        budget: Counts of the prompt.
        dtype: Dtype of the pool.
        pool: Where its memory comes from; None: outside any budget.

    Attributes:
        coded: [L, H, c] int32, prompt positions of the packed tokens.
        escapes: [L, S] int32, count of escaped numbers per segment. The checksums
            cover both.

    Raises:
        TransferError: The pool has no room for ``most_bytes``; nothing was allocated.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        codec: SplitPlanes,
        budget: Budget,
        dtype: torch.dtype,
        pool: HostPagePool | None = None,
    ) -> None:
        super().__init__(geometry.layers)
        self._geometry, self._codec = geometry, codec
        self._budget, self._dtype = budget, dtype
        self._bounds = segment_bounds(budget.coded, budget.run)
        self._fields = fields_of(geometry, codec, budget, dtype)
        self._pages = self._take(pool, most_bytes(geometry, codec, budget, dtype))
        heads = (geometry.layers, geometry.kv_heads)
        shapes = (
            (*heads, budget.exact),
            (*heads, budget.coded),
            (geometry.layers, len(self._bounds)),
        )
        starts, self._end = layout(math.prod(each) * 4 for each in shapes)
        self._positions = tuple(
            HostTensor(self._pages, torch.int32, shape, start)
            for shape, start in zip(shapes, starts, strict=True)
        )
        self._kept_tensor, self.coded, self.escapes = self._positions
        # First byte and length by layer.
        self._regions: dict[int, tuple[int, int]] = {}

    @property
    def slots(self) -> int:
        """See ``HostImage.slots``."""
        return self._budget.staged

    @property
    def _kept(self) -> HostTensor:
        return self._kept_tensor

    @property
    def nbytes_layer(self) -> int:
        """See ``HostImage.nbytes_layer``; the mean over the written layers."""
        return self._held // max(1, len(self._regions))

    @property
    def nbytes(self) -> int:
        """See ``HostImage.nbytes``; positions included."""
        return self._held + sum(each.nbytes for each in self._positions)

    @property
    def _held(self) -> int:
        return sum(nbytes for _, nbytes in self._regions.values())

    def describe(self, exact: torch.Tensor, coded: torch.Tensor) -> None:
        """See ``HostResidual.describe``."""
        super().describe(exact, coded)
        self.coded.write(coded)

    # -- to the host --------------------------------------------------------------

    def outgoing(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """See ``HostImage.outgoing``; encodes the residuals of packed entries.

        Returns:
            The fields of fixed size and the exponents of escaped numbers; the count of
            escaped numbers per segment.
        """
        coded, dropped = self._places(layer, keys.device)
        sides = (keys, values)
        fixed = torch.zeros(self._fields.end, dtype=torch.uint8, device=keys.device)
        for start, side in zip(self._fields.dropped, sides, strict=True):
            _write(fixed, start, pick(side, dropped))
        if not self._bounds:  # a short prompt may have nothing packed
            nothing = fixed.new_empty(0)
            return (fixed, nothing), nothing.to(torch.int32)
        packed = [pick(side, coded).transpose(0, 1) for side in sides]
        segment = self._bounds[0][1]
        planes = encode_residuals(self._codec, packed[0], packed[1], segment)
        for start, rest in zip(
            self._fields.rest, (planes.key_rest, planes.value_rest), strict=True
        ):
            _write(fixed, start, rest)
        return (fixed, planes.escapes), planes.counts

    def receive(
        self, layer: int, parts: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See ``HostImage.receive``.

        Raises:
            TransferError: The escapes of all layers exceed the pages.
        """
        fixed, escapes = parts
        end = len(fixed) + sum(self._escape_bytes(sizes))
        start, left = self._end, self._pages.nbytes - self._end
        if end > left:
            raise TransferError(f"the residual KV of layer {layer} has no room")
        self._regions[layer] = start, end
        self._end += aligned(end)
        self.escapes.write(torch.tensor(sizes, dtype=torch.int32), layer)
        yield from self._pages.copies(start, fixed)
        yield from self._pages.copies(start + len(fixed), escapes[: end - len(fixed)])

    def settle(self) -> None:
        """See ``HostImage.settle``; the size of the escapes is known only now."""
        if not self._pages.freed:
            self._pages.shrink(min(self._end, self._pages.nbytes))

    # -- to and from a store -------------------------------------------------------

    def stored(self) -> dict[str, torch.Tensor]:
        """Return copies of its bytes for a store; sealed, and of one segment.

        Returns:
            ``fixed`` uint8 [L, n], the fields of fixed size; ``counts`` int32 [L], the
            escaped numbers of each layer; ``escapes`` uint8 [*], their exponents.
        """
        regions = [self._region(layer) for layer in range(self.layers)]
        end = self._fields.end
        return {
            "fixed": torch.stack([region[:end] for region in regions]),
            "counts": self.escapes.read().flatten().clone(),
            "escapes": torch.cat([region[end:] for region in regions]),
        }

    def fill(self, stored: Mapping[str, torch.Tensor]) -> None:
        """See ``HostResidual.fill``; the inverse of ``stored``.

        Raises:
            TransferError: The counts do not tell the size of the escapes.
        """
        counts = stored["counts"].tolist()
        sizes = self._escape_bytes(counts)
        if min(counts) < 0 or sum(sizes) != len(stored["escapes"]):
            raise TransferError(f"{len(stored['escapes'])} bytes for {counts} escapes")
        parts = zip(stored["fixed"], stored["escapes"].split(sizes), strict=True)
        for layer, both in enumerate(parts):
            for target, source in self.receive(layer, both, counts[layer : layer + 1]):
                target.copy_(source)
            self.seal(layer)

    # -- to the device ------------------------------------------------------------

    def blocks(self, layer: int, drafts: DraftReader | None) -> Blocks:
        """See ``HostResidual.blocks``; joins draft and residual planes.

        Raises:
            InvariantError: The numbers of draft and residual segments differ.
        """
        residuals = self._residuals(layer)
        parts = [] if drafts is None else drafts(layer)
        if len(parts) != len(residuals):
            raise InvariantError(f"{len(parts)} drafts, {len(residuals)} residuals")
        pairs = [
            # The number of escapes is stored with the residual, not in the slots.
            self._codec.join(
                PartSpec(part.codec, own.part_shape, layer, None, part.tensors), own
            )
            for part, own in zip(parts, residuals, strict=True)
        ]
        coded, dropped = self._places(layer, HOST)
        whole = []
        for i, rows in enumerate(self._dropped(self._region(layer))):
            entries = rows.new_empty(self.slots, *rows.shape[1:])
            put(entries, dropped, rows)
            if pairs:
                packed = torch.cat([pair[i] for pair in pairs], dim=1)
                put(entries, coded, packed.transpose(0, 1))
            whole.append(entries)
        return [whole[0]], [whole[1]]

    def place(
        self,
        layer: int,
        buffers: Buffers,
        target: CopyTarget,
        drafts: DraftReader | None,
    ) -> None:
        """See ``HostImage.place``; on a GPU a kernel joins the planes.

        Raises:
            InvariantError: Tokens are packed, and ``drafts`` is None.
        """
        device = buffers[0].device
        if device.type == "cpu":
            rows = [as_bits(side) for (side,) in self.blocks(layer, drafts)]
            target.write(layer, buffers, rows)
            return
        region = self._region(layer, device)
        coded, dropped = self._places(layer, device)
        index = target.index(layer)
        if index is not None:
            coded, dropped = index.gather(1, coded), index.gather(1, dropped)
        # Read before anything is written: the slots may be those of the draft KV.
        planes = None
        if self._bounds:
            if drafts is None:
                raise InvariantError(f"0 drafts, {len(self._bounds)} residuals")
            planes = drafts.planes(layer)
        if self._budget.dropped:
            own = [as_bits(buffer) for buffer in buffers]
            rows = [as_bits(side) for side in self._dropped(region)]
            put_entries(own, dropped, rows, target.slots)
        if planes is not None:
            first = torch.arange(len(self._bounds), device=device)
            into = PlanesTarget(
                *buffers,
                slots=target.slots,
                places=coded.contiguous(),
                first=first * self._bounds[0][1],
                most_tokens=self._bounds[0][1],
            )
            codec = self._codec
            step = SplitPlanesStep(
                codec.exponent_bits, codec.mantissa_bits, codec.block
            )
            join_planes(planes, self._planes(layer, region), step, into)

    def equals(self, other: HostResidual) -> bool:
        """See ``HostResidual.equals``: it is never shared."""
        return False

    # -- a layer's region ---------------------------------------------------------

    def _region(self, layer: int, device: torch.device = HOST) -> torch.Tensor:
        """Return a layer's bytes on a device; on the host a view if contiguous."""
        start, nbytes = self._regions[layer]
        return gathered_on(device, self._pages.blocks(start, start + nbytes))

    def _dropped(self, region: torch.Tensor) -> list[torch.Tensor]:
        """Return the dropped keys [d, H, D] and values; views."""
        found = []
        dims = (self._geometry.head_dim, self._geometry.v_head_dim)
        for start, dim in zip(self._fields.dropped, dims, strict=True):
            shape = (self._budget.dropped, self._geometry.kv_heads, dim)
            found.append(_read(region, start, self._dtype, shape))
        return found

    def _residuals(self, layer: int) -> list[PartSpec]:
        """Return a layer's residuals, segment by segment; views."""
        region, counts = self._region(layer), self.escapes[layer].tolist()
        ends = accumulate(self._escape_bytes(counts), initial=self._fields.end)
        heads, found = self._geometry.kv_heads, []
        width = FORMATS[self._dtype].exponent
        for (start, stop), count, at in zip(self._bounds, counts, ends, strict=False):
            tensors = {
                name: _read(
                    region,
                    first + start * heads * size,
                    torch.uint8,
                    (heads, stop - start, size),
                )
                for name, first, size in zip(
                    ("key_rest", "value_rest"),
                    self._fields.rest,
                    self._fields.width,
                    strict=True,
                )
            }
            shape = (packed_bytes(count, width),)
            tensors["escapes"] = _read(region, at, torch.uint8, shape)
            part_shape = shape_of(self._geometry, stop - start, self._dtype, count)
            found.append(
                PartSpec(self._codec.identity, part_shape, layer, None, tensors)
            )
        return found

    def _planes(self, layer: int, region: torch.Tensor) -> Residuals:
        """Return a layer's residuals in the kernel's layout, on the region's device."""
        counts = self.escapes.read(layer, region.device)
        taken = escape_bytes(counts.long(), FORMATS[self._dtype].exponent)
        segment = torch.arange(len(self._bounds), device=region.device)
        tokens = self._bounds[0][1] * self._geometry.kv_heads
        offsets = [
            segment * (tokens * size) + first
            for first, size in zip(self._fields.rest, self._fields.width, strict=True)
        ]
        offsets.append(taken.cumsum(0) - taken + self._fields.end)
        return Residuals(region, torch.stack(offsets, dim=1), counts)

    def _escape_bytes(self, counts: Sequence[int]) -> list[int]:
        width = FORMATS[self._dtype].exponent
        return [escape_bytes(count, width) for count in counts]

    def _places(
        self, layer: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int64 indices of packed [H, c] and dropped [H, m - c] entries."""
        kept, coded = (
            positions.read(layer, device).to(torch.int64)
            for positions in (self._kept, self.coded)
        )
        away = residual_indices(kept, self._budget.offered)
        coded = torch.searchsorted(away, coded)
        return coded, residual_indices(coded, self._budget.staged)

    def _parts(self, layer: int) -> tuple[torch.Tensor, ...]:
        start, nbytes = self._regions.get(layer, (0, 0))
        parts = self._pages.blocks(start, start + nbytes)
        return *parts, *(block for each in self._positions for block in each.raw(layer))


def fields_of(
    geometry: KVGeometry, codec: SplitPlanes, budget: Budget, dtype: torch.dtype
) -> Fields:
    """Return the byte layout of a layer; see ``PlaneResidual``."""
    dims = (geometry.head_dim, geometry.v_head_dim)
    rest = FORMATS[dtype].mantissa - codec.mantissa_bits
    width = (packed_bytes(dims[0], rest), packed_bytes(dims[1], rest))
    heads = geometry.kv_heads
    entry = heads * dtype.itemsize * budget.dropped
    sizes = [entry * dim for dim in dims]
    sizes += [heads * budget.coded * size for size in width]
    starts, end = layout(sizes)
    return Fields((starts[0], starts[1]), (starts[2], starts[3]), width, end)


def shape_of(
    geometry: KVGeometry, tokens: int, dtype: torch.dtype, escapes: int = 0
) -> PartShape:
    """Return the shape of a segment's draft KV and residual."""
    return PartShape(
        heads=geometry.kv_heads,
        tokens=tokens,
        key_dim=geometry.head_dim,
        value_dim=geometry.v_head_dim,
        dtype=dtype,
        escapes=escapes,
    )


def most_bytes(
    geometry: KVGeometry, codec: SplitPlanes, budget: Budget, dtype: torch.dtype
) -> int:
    """Return the most bytes that a ``PlaneResidual`` fills: every number escaped.

    Args:
        geometry: Shapes of the pool.
        codec: Codec of the residuals.
        budget: Counts of the prompt.
        dtype: Dtype of the pool.
    """
    bounds = segment_bounds(budget.coded, budget.run)
    numbers = (shape_of(geometry, b - a, dtype).elements for a, b in bounds)
    width = FORMATS[dtype].exponent
    escapes = sum(escape_bytes(count, width) for count in numbers)
    layer = layout((fields_of(geometry, codec, budget, dtype).end + escapes,))[1]
    size = geometry.layers * torch.int32.itemsize
    heads = size * geometry.kv_heads
    positions = (heads * budget.exact, heads * budget.coded, size * len(bounds))
    return layout(positions)[1] + geometry.layers * layer


def _write(region: torch.Tensor, start: int, content: torch.Tensor) -> None:
    """Write a tensor's bytes into ``region``."""
    raw = content.contiguous().view(torch.uint8).view(-1)
    region[start : start + len(raw)].copy_(raw)


def _read(
    region: torch.Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a view of a tensor in ``region``."""
    end = start + math.prod(shape) * dtype.itemsize
    return region[start:end].view(dtype).view(shape)
