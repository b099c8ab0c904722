"""The host link: protocols of copies over it, and an emulated bandwidth."""

from __future__ import annotations

from concurrent.futures import CancelledError
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vericache_sglang.errors import InvariantError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    import torch

    from vericache_sglang.kv.host_image import CopyTarget, DraftReader, HostImage
    from vericache_sglang.kv.host_pages import HostPages
    from vericache_sglang.kv.residual import HostResidual
    from vericache_sglang.kv.staging import Lease

    Blocks = Iterable[tuple[torch.Tensor, torch.Tensor]]
    """Every layer's keys [S, H, D] and values [S, H, Dv], in order."""


class Transfer(Protocol):
    """One asynchronous copy; the engine polls it and never waits for it."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values it moves, all layers."""

    @property
    def seconds(self) -> float:
        """Time on the link, without queueing behind other copies; 0.0 until done."""

    def done(self) -> bool:
        """Return whether every byte is in place.

        Raises:
            TransferError: The copy failed, or a checksum did not match; the message
                names the layer. Or it was cancelled.
        """

    def cancel(self) -> None:
        """Stop the copy; after the return no further writes occur."""


class Transfers(Protocol):
    """Copies between one device's KV pool and the host, in the order of the calls.

    No copy is retried: after a failure the caller may start it again.
    """

    def start(
        self, residual: HostResidual, lease: Lease, drafts: DraftReader | None
    ) -> Transfer:
        """Copy residual KV into the first slots of a lease.

        Each layer is verified, then its keys and values are copied piece by piece; a
        piece is contiguous both in a run of host pages and in a span of the lease.

        Args:
            residual: Sealed.
            lease: Exclusive until the copy is done or cancelled.
            drafts: The draft KV it is joined with, whose slots stay unchanged until
                then; None: nothing is packed.

        Raises:
            InvariantError: The lease is smaller than the residual KV.
        """

    def load(
        self, image: HostImage, target: CopyTarget, drafts: DraftReader | None = None
    ) -> Transfer:
        """Copy an image into any slots; each layer is verified first.

        Args:
            image: Sealed, or being saved.
            target: Slots that are exclusive until the copy is done or cancelled.
            drafts: As for ``start``.
        """

    def place(
        self, image: HostImage, target: CopyTarget, drafts: DraftReader | None = None
    ) -> None:
        """Do as ``load``, ordered before the caller's next work on the device.

        The image may be freed once this returns.

        Raises:
            TransferError: A layer's bytes changed; it and later ones are not written.
        """

    def bring(
        self, blocks: Blocks, slots: torch.Tensor, pages: Iterable[HostPages | None]
    ) -> None:
        """Write entries into any slots, ordered before the caller's next work there.

        All of ``blocks`` is consumed before this returns, and its exceptions propagate;
        the copies themselves may end later. The producer of ``blocks`` verifies them.

        Args:
            blocks: One pair per layer, on the host or the device.
            slots: [S] int64 on the pool's device, unique; exclusive.
            pages: Host pages of the pairs; they may be freed once this returns.

        Raises:
            InvariantError: There are fewer or more pairs than layers.
        """

    def save(self, blocks: Blocks, image: HostImage) -> Transfer:
        """Copy entries to the host and seal them.

        All of ``blocks`` is consumed before this returns, one layer at a time, so a
        generator holds one layer's gathered entries only. The pool's slots they were
        gathered from may be reused at once.

        Args:
            blocks: One pair of gathered tensors per layer.
            image: Receives them; not read before the transfer is done. ``kept``
                positions of a layer are written before its pair is yielded.

        Raises:
            InvariantError: There are fewer or more pairs than layers.
            TransferError: A layer could not be copied; the image is not sealed. For an
                asynchronous copy ``Transfer.done`` raises it.
        """

    def close(self) -> None:
        """Finish the running copy, drop the queued ones, stop the thread."""


class Booking(NamedTuple):
    """Link time of one copy, in seconds of ``time.perf_counter``."""

    begin: float
    end: float


class Link:
    """An emulated serial link, shared by both directions.

    Args:
        gbps: Bandwidth in GB/s (1e9 bytes); 0 for a link that takes no time.
    """

    def __init__(self, gbps: float) -> None:
        self._bytes_per_s = gbps * 1e9
        self._free_at = 0.0
        self._lock = Lock()

    def book(self, nbytes: int, asked: float) -> Booking:
        """Reserve the link for ``nbytes``, behind earlier bookings.

        Args:
            nbytes: Bytes to carry.
            asked: Time of the request; for later layers of a copy the end of the last
                booking, so that a late thread does not slow the link down.
        """
        if not self._bytes_per_s:
            return Booking(asked, asked)
        with self._lock:
            begin = max(asked, self._free_at)
            self._free_at = begin + nbytes / self._bytes_per_s
            return Booking(begin, self._free_at)


def copy_layer(copy: Callable[[int], None], layer: int) -> None:
    """Run ``copy(layer)``.

    Raises:
        TransferError: It failed, for any reason; the message names the layer.
    """
    try:
        copy(layer)
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"copying layer {layer} failed: {error}") from error


def raise_failure(future: Future[None]) -> None:
    """Raise the exception of a finished job, if any.

    Raises:
        TransferError: It failed or was cancelled.
    """
    try:
        future.result()
    except CancelledError:
        raise TransferError("cancelled before layer 0") from None


def numbered(
    blocks: Blocks, layers: int
) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield (layer, pair) for every pair of ``blocks``.

    Raises:
        InvariantError: There are not ``layers`` pairs.
    """
    count = 0
    for pair in blocks:
        if count == layers:
            raise InvariantError(f"more than {layers} layers to save")
        yield count, pair
        count += 1
    if count < layers:
        raise InvariantError(f"{count} layers to save of {layers}")
