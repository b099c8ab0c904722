"""One copy on a CUDA stream, queued by a thread that runs ahead of it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

import torch

from vericache_sglang.errors import TransferError
from vericache_sglang.kv.link import copy_layer, raise_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from threading import Semaphore

    from vericache_sglang.kv.host_image import HostImage
    from vericache_sglang.kv.host_pages import HostPages


def timed() -> torch.cuda.Event:
    """Return an event that records its time."""
    return torch.cuda.Event(enable_timing=True)


class Outgoing(NamedTuple):
    """A layer to be copied to the host.

    Attributes:
        parts: See ``HostImage.outgoing``.
        sizes: See ``HostImage.outgoing``.
        made: Recorded after the work that writes them.
    """

    parts: Sequence[torch.Tensor]
    sizes: torch.Tensor | None
    made: torch.cuda.Event


class HeldMemory:
    """Host pages a copy reads or writes, protected from reuse until it ends.

    Its image may be freed meanwhile, of which the copy engine knows nothing.

    Args:
        lists: Page lists; None among them are skipped.
    """

    def __init__(self, lists: Iterable[HostPages | None]) -> None:
        self._lists: list[HostPages] = [pages for pages in lists if pages]
        for pages in self._lists:
            pages.hold()

    def release(self) -> None:
        """Release the pages; no effect the second time."""
        while self._lists:
            self._lists.pop().release()


@dataclass(slots=True, eq=False)
class StreamTransfer:
    """See ``Transfer``; a thread's job and the CUDA events of what it queued.

    Attributes:
        nbytes: See ``Transfer``; for a save known once it is done.
        held: Host memory it reads or writes.
        seconds: See ``Transfer``; between the first copy and the last on the stream.
        begin: Before the first copy.
        end: After the last copy queued, also where the job failed.
        future: The job; it may end before its copies do.
    """

    nbytes: int
    held: HeldMemory
    seconds: float = 0.0
    begin: torch.cuda.Event = field(default_factory=timed)
    end: torch.cuda.Event = field(default_factory=timed)
    future: Future[None] = field(default_factory=Future)
    _stopped: Event = field(default_factory=Event, init=False)

    def done(self) -> bool:
        """See ``Transfer.done``."""
        if not self.future.done():
            return False
        raise_failure(self.future)
        if not self.end.query():
            return False
        self.seconds = self.begin.elapsed_time(self.end) / 1e3
        self.held.release()
        return True

    def cancel(self) -> None:
        """See ``Transfer.cancel``; waits for the copies that are queued."""
        self._stopped.set()
        if not self.future.cancel():
            self.future.exception()
        self.end.synchronize()
        self.held.release()

    def run_on(self, thread: ThreadPoolExecutor, job: Callable[[], None]) -> None:
        """Submit the job; held memory is released if it never runs."""
        try:
            self.future = thread.submit(job)
        except BaseException:
            self.held.release()
            raise
        self.future.add_done_callback(self._release_cancelled)

    def _release_cancelled(self, job: Future[None]) -> None:
        if job.cancelled():
            self.held.release()

    def load_layers(
        self, stream: torch.cuda.Stream, layers: int, copy: Callable[[int], None]
    ) -> None:
        """Queue ``copy(layer)`` for every layer; the job of a copy to the device.

        Raises:
            TransferError: A layer could not be queued, or the copy was cancelled.
        """
        with torch.cuda.stream(stream):
            self.begin.record()
            try:
                for layer in range(layers):
                    if self._stopped.is_set():
                        raise TransferError(f"cancelled in layer {layer}")
                    copy_layer(copy, layer)
            finally:
                self.end.record()

    def save_layers(
        self,
        stream: torch.cuda.Stream,
        image: HostImage,
        following: Callable[[], Outgoing | None],
        room: Semaphore,
    ) -> None:
        """Queue every layer's copies and seal it; the job of a copy to the host.

        Args:
            stream: Stream of the copies.
            image: Receives the layers.
            following: Waits for the next layer; returns None if there is none.
            room: Released once for every layer that has left the device.

        Raises:
            TransferError: A layer could not be copied, or its producer failed.
        """
        marks: list[torch.cuda.Event] = []

        def seal(layer: int) -> None:
            marks[layer].synchronize()
            room.release()
            image.seal(layer)

        def copy(layer: int) -> None:
            own = following()
            if own is None:
                raise TransferError(f"cancelled in layer {layer}")
            stream.wait_event(own.made)
            if not marks:
                self.begin.record()
            for target, source in image.receive(layer, own.parts, _sizes(own)):
                target.copy_(source, non_blocking=True)
            for part in own.parts:
                # The producer's stream may reuse its memory only after this copy.
                part.record_stream(stream)
            mark = torch.cuda.Event()
            mark.record()
            marks.append(mark)
            if layer:
                seal(layer - 1)

        with torch.cuda.stream(stream):
            try:
                for layer in range(image.layers):
                    copy_layer(copy, layer)
            finally:
                self.end.record()
                self.end.synchronize()
        seal(image.layers - 1)
        self.nbytes = image.nbytes_layer * image.layers


def _sizes(own: Outgoing) -> list[int]:
    """Return a layer's sizes; synchronises, so not for the engine's loop."""
    if own.sizes is None:
        return []
    known = own.sizes.to("cpu", non_blocking=True)
    own.sizes.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().synchronize()
    return known.tolist()
