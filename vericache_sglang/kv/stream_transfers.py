"""The copy engines of a CUDA device; not yet run on one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Semaphore
from typing import TYPE_CHECKING

import torch

from vericache_sglang.errors import TransferError
from vericache_sglang.kv.host_image import CopyTarget
from vericache_sglang.kv.link import numbered, raise_failure
from vericache_sglang.kv.pieces import assign_spans
from vericache_sglang.kv.split_layers import as_bits
from vericache_sglang.kv.stream_transfer import HeldMemory, Outgoing, StreamTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vericache_sglang.kv.host_image import Buffers, DraftReader, HostImage
    from vericache_sglang.kv.host_pages import HostPages
    from vericache_sglang.kv.link import Blocks
    from vericache_sglang.kv.pieces import Piece
    from vericache_sglang.kv.residual import HostResidual
    from vericache_sglang.kv.staging import Lease

IN_FLIGHT = 1 << 29
"""Most bytes gathered on the device for a save before its copies end. Saves are queued
faster than they are copied, and 32K tokens of Llama-3.1-8B are 4 GiB."""


class StreamTransfers:
    """See ``Transfers``; host memory must be pinned, or copies are synchronous.

    One thread and one stream per direction. The load thread verifies each layer's
    checksum and queues its copies, so that verification runs ahead of the link; the
    save thread queues a layer once its size is known, and seals it.

    One copy moves a layer's keys or values in one run of host pages and one span of
    the lease: H * D * element bytes (2 KiB for Llama-3.1-8B in bf16) per entry.
    A prompt of 32K tokens that keeps a quarter is one image of 24576 entries: 48 MiB a
    copy, 64 copies, where its pages are contiguous. A segment (512 tokens, 384 entries)
    is an image of its own: 768 KiB a copy, 4096 copies for the same prompt, above the
    0.5 MB from which set-up is lost in the copy. With 8 ranks it is 96 KiB a copy:
    segments are not contiguous in host memory, and gathering them there first is a
    memcpy no faster than the link.

    Args:
        key_buffers: One [slots, H, D] device tensor per layer.
        value_buffers: One [slots, H, Dv] device tensor per layer.
        forward_stream: The stream of forwards, which may still write slots that were
            freed meanwhile; None: the caller's own.
    """

    def __init__(
        self,
        key_buffers: Sequence[torch.Tensor],
        value_buffers: Sequence[torch.Tensor],
        forward_stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._buffers: list[Buffers] = list(
            zip(key_buffers, value_buffers, strict=True)
        )
        self._forwards = forward_stream
        self._in, self._out = torch.cuda.Stream(), torch.cuda.Stream()
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="vericache-load")
        self._saves = ThreadPoolExecutor(1, thread_name_prefix="vericache-save")
        self._reading: list[tuple[torch.cuda.Event, HeldMemory]] = []

    def start(
        self, residual: HostResidual, lease: Lease, drafts: DraftReader | None
    ) -> StreamTransfer:
        """See ``Transfers.start``."""
        spans = lease.first(residual.slots)
        if not residual.sides(0)[0]:
            device = self._buffers[0][0].device
            slots = [torch.arange(s.start, s.end, device=device) for s in spans]
            return self.load(residual, CopyTarget(torch.cat(slots)), drafts)

        def copy(layer: int) -> None:
            residual.verify(layer)
            sides = residual.sides(layer)
            for buffer, blocks in zip(self._buffers[layer], sides, strict=True):
                for piece in assign_spans([len(block) for block in blocks], spans):
                    _send(buffer, blocks[piece.block], piece)

        return self._load(residual, copy)

    def load(
        self, image: HostImage, target: CopyTarget, drafts: DraftReader | None = None
    ) -> StreamTransfer:
        """See ``Transfers.load``."""
        target.record_stream(self._in)
        if drafts is not None:
            drafts.record_stream(self._in)

        def copy(layer: int) -> None:
            image.verify(layer)
            buffers = self._buffers[layer]
            with target.joined(layer, buffers):
                image.place(layer, buffers, target, drafts)

        return self._load(image, copy)

    def place(
        self, image: HostImage, target: CopyTarget, drafts: DraftReader | None = None
    ) -> None:
        """See ``Transfers.place``; on the caller's stream."""
        with self._written(image.page_lists):
            for layer, buffers in enumerate(self._buffers):
                image.verify(layer)
                with target.joined(layer, buffers):
                    image.place(layer, buffers, target, drafts)

    def bring(
        self, blocks: Blocks, slots: torch.Tensor, pages: Iterable[HostPages | None]
    ) -> None:
        """See ``Transfers.bring``; on the caller's stream."""
        target = CopyTarget(slots)
        with self._written(pages):
            for layer, pair in numbered(blocks, len(self._buffers)):
                buffers = self._buffers[layer]
                rows = [
                    as_bits(entries).to(buffers[0].device, non_blocking=True)
                    for entries in pair
                ]
                target.write(layer, buffers, rows)

    def save(self, blocks: Blocks, image: HostImage) -> StreamTransfer:
        """See ``Transfers.save``.

        Blocks while more than ``IN_FLIGHT`` bytes of the save are in flight.
        """
        transfer = StreamTransfer(0, HeldMemory(image.page_lists))
        layers: SimpleQueue[Outgoing | None] = SimpleQueue()
        entry = image.slots * sum(side[0].nbytes for side in self._buffers[0])
        # Two at least: a layer is sealed while the next one is copied.
        room = Semaphore(max(2, IN_FLIGHT // max(1, entry)))

        def job() -> None:
            try:
                transfer.save_layers(self._out, image, layers.get, room)
            finally:
                transfer.held.release()

        transfer.run_on(self._saves, job)
        for member in image.members:
            member.filling = transfer.future
        try:
            for layer, pair in numbered(blocks, image.layers):
                while not room.acquire(timeout=1.0):
                    if transfer.future.done():
                        raise_failure(transfer.future)
                parts, sizes = image.outgoing(layer, *pair)
                made = torch.cuda.Event()
                made.record()
                layers.put(Outgoing(parts, sizes, made))
        except BaseException as error:
            layers.put(None)
            transfer.cancel()
            if isinstance(error, torch.OutOfMemoryError):
                raise TransferError(f"no memory to gather a layer: {error}") from error
            raise
        return transfer

    def close(self) -> None:
        """See ``Transfers.close``."""
        for thread in (self._loads, self._saves):
            thread.shutdown(cancel_futures=True)
        for stream in (self._in, self._out):
            stream.synchronize()
        for read, _ in self._reading:
            read.synchronize()
        self._reap()

    @contextmanager
    def _written(self, pages: Iterable[HostPages | None]) -> Iterator[None]:
        """Order the body's writes behind the forwards; hold ``pages`` until they end.

        SGLang's schedule stream continues once a forward has read its block table, and
        requests that ended meanwhile have freed slots that the forward still writes.
        """
        self._reap()
        if self._forwards is not None:
            torch.cuda.current_stream().wait_stream(self._forwards)
        held = HeldMemory(pages)
        try:
            yield
        finally:
            read = torch.cuda.Event()
            read.record()
            self._reading.append((read, held))

    def _reap(self) -> None:
        """Release host memory that the device has read."""
        reading, self._reading = self._reading, []
        for read, held in reading:
            if read.query():  # asked once: the device goes on meanwhile
                held.release()
            else:
                self._reading.append((read, held))

    def _load(self, image: HostImage, copy: Callable[[int], None]) -> StreamTransfer:
        # The slots may still be read by a forward that was launched before.
        free = torch.cuda.Event()
        free.record()
        transfer = StreamTransfer(
            image.nbytes_layer * image.layers, HeldMemory(image.page_lists)
        )

        def job() -> None:
            self._in.wait_event(free)
            transfer.load_layers(self._in, image.layers, copy)

        transfer.run_on(self._loads, job)
        return transfer


def _send(buffer: torch.Tensor, source: torch.Tensor, piece: Piece) -> None:
    """Queue one copy to the device."""
    target, rows = as_bits(buffer)[piece.slots], as_bits(source)[piece.rows]
    target.copy_(rows, non_blocking=True)
