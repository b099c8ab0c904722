"""The copy engine of a CUDA device, on a stream of its own. Not yet run on a device."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING

import torch

from vericache_sglang.errors import TransferError
from vericache_sglang.memory.host_image import HostImage, RawImage
from vericache_sglang.memory.link import copy_layer, numbered, raise_failure
from vericache_sglang.memory.splitting import as_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vericache_sglang.memory.complement import Complement, DraftParts
    from vericache_sglang.memory.link import Blocks, Move
    from vericache_sglang.memory.parked import ParkedImage
    from vericache_sglang.memory.staging import Lease


def _timed() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


@dataclass(slots=True, eq=False)
class StreamTransfer:
    """See ``Transfer``; a thread's job and the CUDA events of what it queued.

    Attributes:
        nbytes: See ``Transfer``.
        seconds: See ``Transfer``; between the first copy and the last on the stream.
        stopped: Tells the thread to queue no further layer.
        begin: Before the first copy.
        end: Behind the last copy queued, also where the job failed.
        marks: One event behind each layer queued.
        future: The job; it may end before its copies do.
    """

    nbytes: int
    seconds: float = 0.0
    stopped: Event = field(default_factory=Event)
    begin: torch.cuda.Event = field(default_factory=_timed)
    end: torch.cuda.Event = field(default_factory=_timed)
    marks: list[torch.cuda.Event] = field(default_factory=list)
    future: Future[None] = field(default_factory=Future)
    _arrived: int = field(default=0, init=False)

    @property
    def layers_done(self) -> int:
        """See ``Transfer.layers_done``."""
        while self._arrived < len(self.marks) and self.marks[self._arrived].query():
            self._arrived += 1
        return self._arrived

    def done(self) -> bool:
        """See ``Transfer.done``."""
        if not self.future.done():
            return False
        raise_failure(self.future)
        if not self.end.query():
            return False
        self.seconds = self.begin.elapsed_time(self.end) / 1e3
        return True

    def cancel(self) -> None:
        """See ``Transfer.cancel``; waits for the copies that are queued."""
        self.stopped.set()
        if not self.future.cancel():
            self.future.exception()
        self.end.synchronize()

    def mark(self) -> None:
        """Record that a layer's copies are queued on the current stream."""
        event = torch.cuda.Event()
        event.record()
        self.marks.append(event)


def _raw(image: HostImage) -> RawImage:
    """Refuse what would have to be joined on the device.

    Raises:
        TransferError: It holds residuals.
    """
    if not isinstance(image, RawImage):
        raise TransferError(f"a {image.noun} of residuals is not copied to a GPU yet")
    return image


class StreamTransfers:
    """See ``Transfers``; host memory is pinned.

    A thread checks each layer's checksum and queues its copy, so that the checks run
    ahead of the link. What is saved is queued by the caller and sealed by the thread.

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

    def start(
        self, complement: Complement, lease: Lease, drafts: DraftParts
    ) -> StreamTransfer:
        """See ``Transfers.start``; entries only."""
        pieces = lease.first(complement.slots)

        def move(buffer: torch.Tensor, source: torch.Tensor) -> None:
            filled = 0
            for piece in pieces:
                rows = source[filled : filled + piece.slots]
                buffer[piece.start : piece.end].copy_(rows, non_blocking=True)
                filled += piece.slots

        return self._queue(_raw(complement), move)

    def restore(self, image: ParkedImage, slots: torch.Tensor) -> StreamTransfer:
        """See ``Transfers.restore``."""
        image.require_places(slots)
        slots.record_stream(self._stream)

        def move(buffer: torch.Tensor, source: torch.Tensor) -> None:
            entries = as_bits(source).to(buffer.device, non_blocking=True)
            as_bits(buffer).index_copy_(0, slots, entries)

        return self._queue(image, move)

    def save(self, blocks: Blocks, image: HostImage) -> StreamTransfer:
        """See ``Transfers.save``; entries only."""
        image = _raw(image)
        extent = image.extent
        if extent is not None:  # a request that is aborted gives it back meanwhile
            extent.hold()
        transfer = StreamTransfer(image.nbytes_layer * image.layers)
        transfer.begin.record(self._stream)
        try:
            for layer, pair in numbered(blocks, image.layers):
                self._stream.wait_stream(torch.cuda.current_stream())
                targets = (image.keys[layer], image.values[layer])
                with torch.cuda.stream(self._stream):
                    for target, entries in zip(targets, pair, strict=True):
                        as_bits(target).copy_(as_bits(entries), non_blocking=True)
                        # Its memory is the caller's stream's to reuse only after this.
                        entries.record_stream(self._stream)
                    transfer.mark()
        except BaseException:
            transfer.end.record(self._stream)
            transfer.end.synchronize()
            if extent is not None:
                extent.release()
            raise
        transfer.end.record(self._stream)

        def seal() -> None:
            try:
                for layer, mark in enumerate(transfer.marks):
                    mark.synchronize()
                    image.seal(layer)
            finally:
                if extent is not None:
                    extent.release()

        transfer.future = self._thread.submit(seal)
        return transfer

    def close(self) -> None:
        """See ``Transfers.close``."""
        self._thread.shutdown(cancel_futures=True)
        self._stream.synchronize()

    def _queue(self, image: RawImage, move: Move) -> StreamTransfer:
        # The slots may still be read by a forward that was launched before.
        free = torch.cuda.Event()
        free.record()
        transfer = StreamTransfer(image.nbytes_layer * image.layers)

        def copy(layer: int) -> None:
            image.verify(layer)
            move(self._keys[layer], image.keys[layer])
            move(self._values[layer], image.values[layer])
            transfer.mark()

        transfer.future = self._thread.submit(
            self._run, transfer, free, image.layers, copy
        )
        return transfer

    def _run(
        self,
        transfer: StreamTransfer,
        free: torch.cuda.Event,
        layers: int,
        copy: Callable[[int], None],
    ) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(free)
            transfer.begin.record()
            try:
                for layer in range(layers):
                    if transfer.stopped.is_set():
                        raise TransferError(f"cancelled in layer {layer}")
                    copy_layer(copy, layer)
            finally:
                transfer.end.record()
