"""The host link: what a copy over it promises, and the pace of an emulated one."""

from __future__ import annotations

from concurrent.futures import CancelledError
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vericache_sglang.errors import InvariantError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    import torch

    from vericache_sglang.kv.host_image import CopyTarget, DraftParts, HostImage
    from vericache_sglang.kv.host_pages import HostPages
    from vericache_sglang.kv.residual import HostResidual
    from vericache_sglang.kv.staging import Lease

    Blocks = Iterable[tuple[torch.Tensor, torch.Tensor]]
    """Every layer's keys [S, H, D] and values [S, H, Dv], in order."""


class Transfer(Protocol):
    """One copy on its way; polled by the engine, never waited for."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values it moves, all layers."""

    @property
    def seconds(self) -> float:
        """Time on the link, not that spent behind other copies; 0.0 until done."""

    def done(self) -> bool:
        """Say whether every byte is in place.

        Raises:
            TransferError: The copy failed, or a checksum did not match; the message
                names the layer. Or it was cancelled.
        """

    def cancel(self) -> None:
        """Stop when convenient; returns only when no byte will be written any more."""


class Transfers(Protocol):
    """Copies between one device's KV pool and the host, in the order they are asked.

    Nothing is tried twice: after a failure the caller may ask for the copy again.
    """

    def start(
        self, residual: HostResidual, lease: Lease, drafts: DraftParts | None
    ) -> Transfer:
        """Copy a complement into the first slots of a lease.

        Each layer is verified, then keys and values go with one contiguous copy per
        piece: what of one run of host pages lies in one span of the lease.

        Args:
            residual: Sealed.
            lease: Nobody else's until the copy is done or cancelled.
            drafts: The draft part it is joined with, which stays where it is until
                then; None: it has none.

        Raises:
            InvariantError: The lease is smaller than the complement.
        """

    def load(
        self, image: HostImage, target: CopyTarget, drafts: DraftParts | None = None
    ) -> Transfer:
        """Copy an image back into any slots, each layer once it is verified.

        Args:
            image: Sealed, or being saved.
            target: Slots that are nobody else's until the copy is done or cancelled.
            drafts: As for ``start``.
        """

    def place(
        self, image: HostImage, target: CopyTarget, drafts: DraftParts | None = None
    ) -> None:
        """Do the same now; what the caller does next on the device sees the entries.

        The image may be freed at once.

        Raises:
            TransferError: A layer's bytes changed; it and later ones are not written.
        """

    def bring(
        self, blocks: Blocks, slots: torch.Tensor, pages: Iterable[HostPages | None]
    ) -> None:
        """Write entries into any slots; what the caller does next there sees them.

        All of ``blocks`` is consumed before this returns, and what it raises is raised;
        the bytes themselves may follow. Whoever makes it checks what it yields.

        Args:
            blocks: One pair per layer, on the host or the device.
            slots: [S] int64 on the pool's device, unique; nobody else's.
            pages: Host memory the pairs lie in; it may be freed at once.

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
            image: Receives them; not read before the transfer is done. A complement's
                ``kept`` positions of a layer are written before its pair is yielded.

        Raises:
            InvariantError: There are fewer or more pairs than layers.
            TransferError: A layer could not be copied; the image is not sealed. Where
                copies go on behind the caller's back, ``Transfer.done`` may raise it.
        """

    def close(self) -> None:
        """Finish the copy that runs, drop those that wait, release the thread."""


class Booking(NamedTuple):
    """Link time of one copy, in seconds of ``time.perf_counter``."""

    begin: float
    end: float


class Link:
    """One serial link with a bandwidth of its own, shared by both directions.

    Args:
        gbps: Bandwidth in GB/s (1e9 bytes); 0 for a link that takes no time.
    """

    def __init__(self, gbps: float) -> None:
        self._bytes_per_s = gbps * 1e9
        self._free_at = 0.0
        self._lock = Lock()

    def book(self, nbytes: int, asked: float) -> Booking:
        """Reserve the link for ``nbytes``, behind what was booked before.

        Args:
            nbytes: Bytes to carry.
            asked: When the copy wanted the link; in the past for one that goes on, so
                that a late thread does not make the link slower.
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
        TransferError: It failed, whatever the reason; the message names the layer.
    """
    try:
        copy(layer)
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"copying layer {layer} failed: {error}") from error


def raise_failure(future: Future[None]) -> None:
    """Raise what a finished job raised.

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
