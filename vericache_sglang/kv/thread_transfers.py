"""A memcpy thread: the host link of a machine without a GPU."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from time import perf_counter
from typing import TYPE_CHECKING

from vericache_sglang.errors import TransferError
from vericache_sglang.kv.link import Link, copy_layer, numbered, raise_failure
from vericache_sglang.kv.pieces import assign_spans
from vericache_sglang.kv.split_layers import as_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from vericache_sglang.kv.host_image import CopyTarget, DraftReader, HostImage
    from vericache_sglang.kv.host_pages import HostPages
    from vericache_sglang.kv.link import Blocks, Booking
    from vericache_sglang.kv.pieces import Piece
    from vericache_sglang.kv.residual import HostResidual
    from vericache_sglang.kv.staging import Lease


@dataclass(slots=True, eq=False)
class ThreadTransfer:
    """See ``Transfer``; copied layer by layer by the link's thread."""

    nbytes: int
    seconds: float = 0.0
    _stopped: Event = field(default_factory=Event, init=False)
    _future: Future[None] = field(default_factory=Future, init=False)

    def done(self) -> bool:
        """See ``Transfer.done``."""
        if not self._future.done():
            return False
        raise_failure(self._future)
        return True

    def cancel(self) -> None:
        """See ``Transfer.cancel``; waits at most for one layer's memcpy."""
        self._stopped.set()
        if not self._future.cancel():
            self._future.exception()

    def run_on(
        self,
        thread: ThreadPoolExecutor,
        link: Link,
        layers: int,
        copy: Callable[[int], None],
    ) -> None:
        """Queue the copy: ``copy(layer)`` for every layer, at the pace of ``link``."""
        self._future = thread.submit(self._run, link, layers, copy)

    def _run(self, link: Link, layers: int, copy: Callable[[int], None]) -> None:
        began = asked = perf_counter()
        behind = 0.0
        for layer in range(layers):
            booking = link.book(self.nbytes // layers, asked)
            behind += booking.begin - asked
            asked = booking.end
            copy_layer(copy, layer)
            if self._stopped.wait(max(0.0, booking.end - perf_counter())):
                raise TransferError(f"cancelled in layer {layer}")
        self.seconds = perf_counter() - began - behind


@dataclass(frozen=True, slots=True, eq=False)
class BookedTransfer:
    """See ``Transfer``; a finished copy, done once the emulated link has carried it.

    Attributes:
        nbytes: See ``Transfer``.
        booking: Time interval on the emulated link.
        copy_seconds: Duration of the memcpy.
    """

    nbytes: int
    booking: Booking
    copy_seconds: float

    @property
    def seconds(self) -> float:
        """See ``Transfer.seconds``."""
        booked = self.booking.end - self.booking.begin
        return max(self.copy_seconds, booked) if self.done() else 0.0

    def done(self) -> bool:
        """See ``Transfer.done``; never raises, the copy was made before."""
        return perf_counter() >= self.booking.end

    def cancel(self) -> None:
        """See ``Transfer.cancel``; no effect, every byte is written."""


class ThreadTransfers:
    """See ``Transfers``.

    Args:
        key_buffers: One [slots, H, D] tensor per layer.
        value_buffers: One [slots, H, Dv] tensor per layer.
        link_gbps: Emulated bandwidth in GB/s (1e9 bytes); 0 copies at full speed.
    """

    def __init__(
        self,
        key_buffers: Sequence[torch.Tensor],
        value_buffers: Sequence[torch.Tensor],
        link_gbps: float,
    ) -> None:
        self._keys = key_buffers
        self._values = value_buffers
        self._link = Link(link_gbps)
        # One thread: a link carries one copy at a time, in the order of the calls.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vericache-link")

    def start(
        self, residual: HostResidual, lease: Lease, drafts: DraftReader | None
    ) -> ThreadTransfer:
        """See ``Transfers.start``."""
        spans = lease.first(residual.slots)

        def copy(layer: int) -> None:
            residual.verify(layer)
            buffers = self._keys[layer], self._values[layer]
            sides = residual.blocks(layer, drafts)
            for buffer, blocks in zip(buffers, sides, strict=True):
                for piece in assign_spans([len(block) for block in blocks], spans):
                    _copy_piece(buffer, blocks[piece.block], piece)

        return self._queue(residual, copy)

    def load(
        self, image: HostImage, target: CopyTarget, drafts: DraftReader | None = None
    ) -> ThreadTransfer:
        """See ``Transfers.load``."""

        def copy(layer: int) -> None:
            image.verify(layer)
            buffers = self._keys[layer], self._values[layer]
            with target.joined(layer, buffers):
                image.place(layer, buffers, target, drafts)

        return self._queue(image, copy)

    def place(
        self, image: HostImage, target: CopyTarget, drafts: DraftReader | None = None
    ) -> None:
        """See ``Transfers.place``; not at the pace of an emulated link."""
        pairs = zip(self._keys, self._values, strict=True)
        for layer, buffers in enumerate(pairs):
            image.verify(layer)
            with target.joined(layer, buffers):
                image.place(layer, buffers, target, drafts)

    def bring(
        self, blocks: Blocks, slots: torch.Tensor, pages: Iterable[HostPages | None]
    ) -> None:
        """See ``Transfers.bring``; at once, and not at the pace of an emulated link."""
        for layer, pair in numbered(blocks, len(self._keys)):
            buffers = self._keys[layer], self._values[layer]
            for buffer, entries in zip(buffers, pair, strict=True):
                as_bits(buffer)[slots] = as_bits(entries)

    def save(self, blocks: Blocks, image: HostImage) -> BookedTransfer:
        """See ``Transfers.save``; copies in the caller's thread.

        Only the emulated link's time passes asynchronously: later copies start after
        it.
        """
        asked = perf_counter()
        seconds = 0.0
        for layer, (keys, values) in numbered(blocks, image.layers):
            began = perf_counter()
            copy_layer(partial(image.write, keys=keys, values=values), layer)
            seconds += perf_counter() - began
        nbytes = image.nbytes_layer * image.layers
        booking = self._link.book(nbytes, asked)
        return BookedTransfer(nbytes, booking, seconds)

    def close(self) -> None:
        """See ``Transfers.close``."""
        self._thread.shutdown(cancel_futures=True)

    def _queue(self, image: HostImage, copy: Callable[[int], None]) -> ThreadTransfer:
        transfer = ThreadTransfer(image.nbytes_layer * image.layers)
        transfer.run_on(self._thread, self._link, image.layers, copy)
        return transfer


def _copy_piece(buffer: torch.Tensor, source: torch.Tensor, piece: Piece) -> None:
    """Fill a piece of a layer's buffer with its part of ``source``."""
    # numpy's copy is one memcpy without the interpreter lock; a torch copy would start
    # a second team of OpenMP threads beside the forward.
    rows = as_bits(source).numpy()[piece.rows]
    as_bits(buffer).numpy()[piece.slots] = rows
