"""The copy engine of a CUDA device, on a stream of its own. Not yet run on a device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from vericache_sglang.errors import TransferError
from vericache_sglang.memory.link import numbered
from vericache_sglang.memory.pieces import deal
from vericache_sglang.memory.splitting import as_bits
from vericache_sglang.memory.staging import Span
from vericache_sglang.memory.stream_transfer import Held, StreamTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vericache_sglang.memory.arena import Extent
    from vericache_sglang.memory.complement import Complement, DraftParts
    from vericache_sglang.memory.host_image import Entries, HostImage
    from vericache_sglang.memory.link import Blocks
    from vericache_sglang.memory.parked import ParkedImage
    from vericache_sglang.memory.pieces import Piece
    from vericache_sglang.memory.staging import Lease

IN_FLIGHT = 1 << 29
"""Bytes gathered on the device for a save whose copies have not ended. Saves are queued
faster than they are copied, and 32K tokens of Llama-3.1-8B are 4 GiB."""


def _images(image: HostImage) -> tuple[Entries, ...]:
    """Return where entries lie as they are.

    Raises:
        TransferError: They would have to be joined on the device.
    """
    if not image.images:
        raise TransferError(f"a {image.noun} of residuals is not copied to a GPU yet")
    return image.images


class StreamTransfers:
    """See ``Transfers``; host memory is pinned, or a copy would wait for itself.

    A thread checks each layer's checksum and queues its copies, so that the checks run
    ahead of the link. What is saved is queued by the caller and sealed by the thread.

    What one copy moves is a layer's keys or values of one image in one span of the
    lease: H * D * element bytes (2 KiB for Llama-3.1-8B in bf16) per entry. A prompt of
    32K tokens that keeps a quarter is one image of 24576 entries: 48 MiB a copy, 64
    copies. A segment (512 tokens, 384 entries) is an image of its own: 768 KiB a copy,
    4096 copies for the same prompt, above the 0.5 MB from which set-up is lost in the
    copy. With 8 ranks it is 96 KiB a copy: segments do not lie side by side in host
    memory, and gathering them there first is a memcpy no faster than the link.

    Args:
        key_buffers: One [slots, H, D] device tensor per layer.
        value_buffers: One [slots, H, Dv] device tensor per layer.
    """

    def __init__(
        self,
        key_buffers: Sequence[torch.Tensor],
        value_buffers: Sequence[torch.Tensor],
    ) -> None:
        self._keys = key_buffers
        self._values = value_buffers
        self._stream = torch.cuda.Stream()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vericache-link")
        self._reading: list[tuple[torch.cuda.Event, Held]] = []

    def start(
        self, complement: Complement, lease: Lease, drafts: DraftParts
    ) -> StreamTransfer:
        """See ``Transfers.start``; entries only."""
        images = _images(complement)
        pieces = list(
            deal([image.slots for image in images], lease.first(complement.slots))
        )

        def copy(layer: int) -> None:
            complement.verify(layer)
            for piece in pieces:
                image = images[piece.block]
                _send(self._keys[layer], image.keys[layer], piece)
                _send(self._values[layer], image.values[layer], piece)

        return self._queue(complement, copy)

    def restore(self, image: ParkedImage, slots: torch.Tensor) -> StreamTransfer:
        """See ``Transfers.restore``."""
        image.require_places(slots)
        slots.record_stream(self._stream)

        def copy(layer: int) -> None:
            image.verify(layer)
            for buffer, source in (
                (self._keys[layer], image.keys[layer]),
                (self._values[layer], image.values[layer]),
            ):
                entries = as_bits(source).to(buffer.device, non_blocking=True)
                as_bits(buffer).index_copy_(0, slots, entries)

        return self._queue(image, copy)

    def bring(
        self, blocks: Blocks, slots: torch.Tensor, extents: Iterable[Extent | None]
    ) -> None:
        """See ``Transfers.bring``; on the caller's stream."""
        self._reap()
        held = Held(extents)
        try:
            for layer, pair in numbered(blocks, len(self._keys)):
                buffers = self._keys[layer], self._values[layer]
                for buffer, entries in zip(buffers, pair, strict=True):
                    there = as_bits(entries).to(buffer.device, non_blocking=True)
                    as_bits(buffer).index_copy_(0, slots, there)
        finally:
            read = torch.cuda.Event()
            read.record()
            self._reading.append((read, held))

    def save(self, blocks: Blocks, image: HostImage) -> StreamTransfer:
        """See ``Transfers.save``; entries only.

        The caller waits for the link where more than ``IN_FLIGHT`` bytes are on it.
        """
        images = _images(image)
        pieces = list(deal([each.slots for each in images], [Span(0, image.slots)]))
        transfer = StreamTransfer(image.nbytes_layer * image.layers, _held(images))
        transfer.begin.record(self._stream)
        try:
            for layer, pair in numbered(blocks, image.layers):
                self._stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._stream):
                    for piece in pieces:
                        own = images[piece.block]
                        _fetch(own.keys[layer], pair[0], piece)
                        _fetch(own.values[layer], pair[1], piece)
                    for entries in pair:
                        # Its memory is the caller's stream's to reuse only after this.
                        entries.record_stream(self._stream)
                    transfer.mark()
                behind = layer + 1 - max(1, IN_FLIGHT // max(1, image.nbytes_layer))
                if behind >= 0:
                    transfer.marks[behind].synchronize()
        except BaseException:
            transfer.end.record(self._stream)
            transfer.end.synchronize()
            transfer.held.let_go()
            raise
        transfer.end.record(self._stream)

        def seal() -> None:
            try:
                for layer, mark in enumerate(transfer.marks):
                    mark.synchronize()
                    image.seal(layer)
            finally:
                transfer.held.let_go()

        transfer.run_on(self._thread, seal)
        return transfer

    def close(self) -> None:
        """See ``Transfers.close``."""
        self._thread.shutdown(cancel_futures=True)
        self._stream.synchronize()
        for read, _ in self._reading:
            read.synchronize()
        self._reap()

    def _reap(self) -> None:
        """Let go of host memory the device has read."""
        for read, held in self._reading:
            if read.query():
                held.let_go()
        self._reading = [each for each in self._reading if not each[0].query()]

    def _queue(self, image: HostImage, copy: Callable[[int], None]) -> StreamTransfer:
        # The slots may still be read by a forward that was launched before.
        free = torch.cuda.Event()
        free.record()
        transfer = StreamTransfer(
            image.nbytes_layer * image.layers, _held(_images(image))
        )

        def job() -> None:
            self._stream.wait_event(free)
            transfer.copy_layers(self._stream, image.layers, copy)

        transfer.run_on(self._thread, job)
        return transfer


def _held(images: Sequence[Entries]) -> Held:
    return Held(image.extent for image in images)


def _send(buffer: torch.Tensor, source: torch.Tensor, piece: Piece) -> None:
    """Queue one copy to the device."""
    target, rows = as_bits(buffer)[piece.slots], as_bits(source)[piece.rows]
    target.copy_(rows, non_blocking=True)


def _fetch(target: torch.Tensor, entries: torch.Tensor, piece: Piece) -> None:
    """Queue one copy to the host; ``piece.span`` counts the entries gathered."""
    rows = as_bits(entries)[piece.slots]
    as_bits(target)[piece.rows].copy_(rows, non_blocking=True)
