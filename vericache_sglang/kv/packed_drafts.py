"""Packed draft KV of running requests: written once, read by every draft forward."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import torch

from vericache_kernels.join_planes import DraftPlanes
from vericache_kernels.run_attention.runs import MOST_SLOTS_A_PART
from vericache_sglang.compression.budget import Budget, code_from
from vericache_sglang.compression.codecs.base import PartShape
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.errors import CompressionError, StoreError, TransferError
from vericache_sglang.kv.calibration import seconds_of
from vericache_sglang.kv.code_slots import CodeLayout
from vericache_sglang.kv.plane_residual import PlaneResidual
from vericache_sglang.kv.segment_length import SEGMENT, segment_bounds
from vericache_sglang.scheduling.plan import Residency

if TYPE_CHECKING:
    from collections.abc import Callable

    from vericache_kernels.packed_attention import Segment
    from vericache_sglang.compression.codecs.base import Codec, PartSpec, Tensors
    from vericache_sglang.kv.handles import KVHandles
    from vericache_sglang.kv.request import RequestState


class Codes:
    """Packs, locates and decodes the packed draft KV of compressed requests.

    Args:
        codec: Bound to the model.
        handles: Pool and block table.

    Raises:
        CompressionError: Its blocks do not divide a segment.
    """

    def __init__(self, codec: Codec, handles: KVHandles) -> None:
        self.codec = codec
        self._handles = handles
        self.block = math.lcm(handles.geometry.page_size, codec.needs.token_align)
        if SEGMENT % self.block:
            raise CompressionError(
                f"--vericache-compressor: {codec.name} packs {self.block} tokens "
                f"together, which does not divide a segment of {SEGMENT}"
            )
        self._layouts = cache(self._new_layout)

    @property
    def transfer_fraction(self) -> float:
        """Bytes a verification loads, over the bytes of the packed tokens' KV."""
        geometry = self._handles.geometry
        part_shape = PartShape(
            heads=geometry.kv_heads,
            tokens=SEGMENT,
            key_dim=geometry.head_dim,
            value_dim=geometry.v_head_dim,
            dtype=self._handles.host.dtype,
        )
        return self.codec.transfer_fraction(part_shape)

    def complete(self, budget: Budget) -> Budget:
        """Return the budget with as many tokens packed as fill whole blocks."""
        packed = code_from(budget, self.block)
        return replace(packed, code_slots=self.layout(packed).slots)

    def segment(self, tokens: int, kept: int) -> Budget:
        """Return the counts of a segment that prompts share: all kept tokens packed.

        Args:
            tokens: Its tokens.
            kept: Tokens that each head keeps, whole blocks.
        """
        packed = Budget(tokens, kept, 0, 0, coded=kept, run=kept)
        return replace(packed, code_slots=self.layout(packed).slots)

    def layout(self, budget: Budget) -> CodeLayout:
        """Return the layout of a prompt's codes in its code slots."""
        return self._layouts(budget.coded, budget.run)

    def encode(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        run: int = 0,
    ) -> list[PartSpec]:
        """Pack tokens of one layer.

        Args:
            layer: Layer index.
            keys: [coded, H, D] of these tokens.
            values: [coded, H, Dv].
            positions: [H, coded] integers, their positions in the prompt.
            run: See ``Budget.run``.

        Returns:
            Packed draft KV, one part per segment.
        """
        return [
            self.codec.encode_draft(
                keys[start:stop].transpose(0, 1),
                values[start:stop].transpose(0, 1),
                layer=layer,
                positions=positions[:, start:stop],
                sinks=torch.empty(0, dtype=torch.int64),
            )
            for start, stop in segment_bounds(positions.shape[1], run)
        ]

    def put(
        self, layer: int, slots: torch.Tensor, parts: list[PartSpec], run: int = 0
    ) -> None:
        """Write one layer's packed draft KV.

        Args:
            layer: Layer index.
            slots: [code slots] int64.
            parts: As ``encode`` returned them.
            run: As given to ``encode``.
        """
        layout = self._layouts(sum(part.part_shape.tokens for part in parts), run)
        for segment, part in zip(layout.segments, parts, strict=True):
            layout.write(segment, self.buffers(layer), slots, part)

    def drafts(self, state: RequestState) -> SlotDrafts:
        """Return a reader of a request's packed draft KV in its present slots."""
        parts = state.split
        layout, slots = self.layout(parts.budget), self._slots(state)
        return SlotDrafts(layout, self.buffers, parts.coded, slots)

    def read(self, tensors: Tensors) -> SlotDrafts:
        """Return a reader of a segment's packed draft KV on the host.

        Args:
            tensors: ``keys`` [L, slots, H, D], ``values``, and ``coded`` [L, H, c].
        """
        keys, values, coded = (tensors[name] for name in ("keys", "values", "coded"))
        return SlotDrafts(
            self._layouts(coded.shape[2], 0),
            lambda layer: (keys[layer], values[layer]),
            coded,
            torch.arange(keys.shape[1]),
        )

    def used(self, kept: int) -> int:
        """Return the slots that hold the codes of a segment; others fill its pages."""
        return self._layouts(kept, 0).used

    def whole(self, draft: Tensors, rest: Tensors, tokens: int) -> Tensors:
        """Return the full KV of a segment as it is stored, in token order.

        Args:
            draft: As for ``read``.
            rest: ``PlaneResidual.stored``, or the full KV where the codec has no
                residual of its own.
            tokens: Its tokens.

        Returns:
            ``keys`` [L, tokens, H, D] and ``values``.

        Raises:
            CompressionError: The parts do not belong together.
            TransferError: Likewise.
        """
        if not isinstance(self.codec, SplitPlanes):
            return rest
        geometry, dtype = self._handles.geometry, self._handles.host.dtype
        budget = self.segment(tokens, draft["coded"].shape[2])
        residual = PlaneResidual(geometry, self.codec, budget, dtype)
        residual.describe(draft["coded"][..., :0], draft["coded"])
        residual.fill(rest)
        drafts = self.read(draft)
        found = [residual.blocks(layer, drafts) for layer in range(geometry.layers)]
        keys, values = zip(*found, strict=True)
        return {
            name: torch.stack([torch.cat(blocks) for blocks in side])
            for name, side in (("keys", keys), ("values", values))
        }

    def check(self, draft: Tensors, rest: Tensors | None, tokens: int) -> None:
        """Require that a segment as it is stored is restored and decoded finitely.

        Args:
            draft: As for ``whole``.
            rest: As for ``whole``; None: the draft KV alone is decoded.
            tokens: As for ``whole``.

        Raises:
            StoreError: tensor: it is not; non-finite KV could end the process.
        """
        drafts, layers = self.read(draft), range(self._handles.geometry.layers)
        # The class's own: failures of the guarded one are those of a request.
        decode = type(self.codec).decode
        try:
            sides = [*self.whole(draft, rest, tokens).values()] if rest else []
            for layer in layers:
                sides += decode(self.codec, drafts.part(layer, 0))
        except (CompressionError, TransferError) as error:
            raise StoreError("tensor", f"codes: {error}") from error
        if not all(bool(side.isfinite().all()) for side in sides):
            raise StoreError("tensor", "codes: not every entry is finite")

    def segments(self, state: RequestState) -> Callable[[int], list[Segment]]:
        """Return a function from layer to decoders, one per segment of the draft KV."""
        drafts = self.drafts(state)

        def decoded(layer: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.codec.decode(drafts.part(layer, i))

        return lambda layer: [
            partial(decoded, layer, i) for i in range(len(drafts.layout.segments))
        ]

    def decoded(self, state: RequestState) -> Callable[[int], list[Segment]]:
        """Return what ``segments`` does, but joined, decoded once and kept.

        For a CPU, where no kernel decodes while it reads: to decode takes many times as
        long as attention does. A request keeps its decoded draft KV until it ends.
        """
        drafts, kept = self.drafts(state), state.split.decoded

        def pieces(layer: int) -> list[Segment]:
            if layer not in kept:
                found = [self.codec.decode(part) for part in drafts(layer)]
                keys, values = (
                    torch.cat(side, dim=1).split(MOST_SLOTS_A_PART, dim=1)
                    for side in zip(*found, strict=True)
                )
                pairs = zip(keys, values, strict=True)
                kept[layer] = [partial(_decoded, *pair) for pair in pairs]
            return kept[layer]

        return pieces

    def seconds_per_token(self) -> float:
        """Time decoding one segment of one layer; return seconds per packed token."""
        geometry, device = self._handles.geometry, self._handles.device
        shape = (SEGMENT, geometry.kv_heads, geometry.head_dim)
        keys = torch.zeros(shape, dtype=self._handles.host.dtype, device=device)
        where = torch.arange(SEGMENT, device=device).expand(geometry.kv_heads, SEGMENT)
        part = self.encode(0, keys, keys, where)[0]
        return seconds_of(lambda: self.codec.decode(part), device) / SEGMENT

    def _slots(self, state: RequestState) -> torch.Tensor:
        """Return a request's code slots: the first slots of its draft KV."""
        parts = state.split
        if parts.shared_slots is not None:
            return parts.shared_slots
        first = parts.budget.offered if parts.residency is Residency.DEVICE else 0
        row = self._handles.row(state)
        return row[first : first + parts.budget.code_slots].to(torch.int64).clone()

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pool's keys and values of a layer."""
        pool = self._handles.pool
        return pool.k_buffer[layer], pool.v_buffer[layer]

    def _new_layout(self, coded: int, run: int) -> CodeLayout:
        geometry, dtype = self._handles.geometry, self._handles.host.dtype
        return CodeLayout(self.codec, geometry, dtype, coded, run)


def _decoded(
    keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return keys, values


class SlotDrafts:
    """See ``DraftReader``; reads the slots a request had at its construction.

    Args:
        layout: Layout of the codes in the slots.
        buffers: Returns keys and values of a layer, which ``slots`` index.
        coded: [L, H, coded] integers, positions of the packed tokens.
        slots: [code slots] int64.

    Attributes:
        layout: As given.
    """

    def __init__(
        self,
        layout: CodeLayout,
        buffers: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
        coded: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        self.layout = layout
        self._buffers, self._coded, self._slots = buffers, coded, slots

    def __call__(self, layer: int) -> list[PartSpec]:
        """See ``DraftReader``."""
        return [self.part(layer, i) for i in range(len(self.layout.segments))]

    def part(self, layer: int, i: int) -> PartSpec:
        """Return one layer's draft KV of a segment."""
        span = self.layout.segments[i]
        positions = self._coded[layer, :, span.start : span.start + span.tokens]
        return self.layout.read(
            span, self._buffers(layer), self._slots, layer, positions
        )

    def of(self, segment: int) -> SlotDrafts:
        """See ``DraftReader.of``."""
        return self._each[segment]

    @cached_property
    def _each(self) -> list[SlotDrafts]:
        segments = self.layout.segments
        layouts = {
            n: replace(self.layout, coded=n, run=0)
            for n in {s.tokens for s in segments}
        }
        return [
            SlotDrafts(
                layouts[span.tokens],
                self._buffers,
                self._coded[:, :, span.start : span.start + span.tokens],
                self._slots[span.first : span.first + span.slots],
            )
            for span in segments
        ]

    def planes(self, layer: int) -> DraftPlanes:
        """See ``DraftReader.planes``; without shared segments, see ``of``."""
        images = self.layout.images(self._buffers(layer), self._slots)
        return DraftPlanes(*images, *self._where)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """See ``DraftReader.record_stream``."""
        self._slots.record_stream(stream)

    @cached_property
    def _where(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the field offsets and the token count of every segment.

        Computed on the device: an upload from the host would synchronise.
        """
        segments, device = self.layout.segments, self._slots.device
        first, second, last = segments[0], segments[:2][-1], segments[-1]
        number = torch.arange(len(segments), device=device)
        ends = self.layout.offsets(last)
        columns = []
        for name, offset in self.layout.offsets(first).items():
            width = self.layout.widths[name.startswith("value")]
            column = number * (second.first * width) + offset
            column[-1:].add_(ends[name] - offset)
            columns.append(column)
        tokens = torch.full_like(number, first.tokens, dtype=torch.int32)
        tokens[-1:].fill_(last.tokens)
        return torch.stack(columns, dim=1), tokens
