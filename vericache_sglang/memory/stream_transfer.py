"""One copy on a CUDA stream, queued by a thread that runs ahead of it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Condition, Event
from typing import TYPE_CHECKING

import torch

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.memory.link import copy_layer, raise_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vericache_sglang.memory.arena import Extent


def timed() -> torch.cuda.Event:
    """Return an event whose time can be read."""
    return torch.cuda.Event(enable_timing=True)


class Held:
    """Extents a copy reads or writes, kept where they are until it has ended.

    What frees its image meanwhile gives the bytes back; the copy engine does not know.

    Args:
        extents: None among them are left out.
    """

    def __init__(self, extents: Iterable[Extent | None]) -> None:
        self._extents: list[Extent] = [extent for extent in extents if extent]
        for extent in self._extents:
            extent.hold()

    def let_go(self) -> None:
        """Release them; nothing happens the second time."""
        while self._extents:
            self._extents.pop().release()


@dataclass(slots=True, eq=False)
class StreamTransfer:
    """See ``Incoming``; a thread's job and the CUDA events of what it queued.

    Attributes:
        nbytes: See ``Transfer``.
        held: Host memory it reads or writes.
        seconds: See ``Transfer``; between the first copy and the last on the stream.
        begin: Before the first copy.
        end: Behind the last copy queued, also where the job failed.
        marks: One event behind each layer queued.
        future: The job; it may end before its copies do.
    """

    nbytes: int
    held: Held
    seconds: float = 0.0
    begin: torch.cuda.Event = field(default_factory=timed)
    end: torch.cuda.Event = field(default_factory=timed)
    marks: list[torch.cuda.Event] = field(default_factory=list)
    future: Future[None] = field(default_factory=Future)
    _stopped: Event = field(default_factory=Event, init=False)
    _queued: Condition = field(default_factory=Condition, init=False)
    _arrived: int = field(default=0, init=False)

    @property
    def layers_done(self) -> int:
        """See ``Transfer.layers_done``."""
        while self._arrived < len(self.marks) and self.marks[self._arrived].query():
            self._arrived += 1
        return self._arrived

    @property
    def layer_s(self) -> float:
        """See ``Incoming.layer_s``; on the stream, not in the thread."""
        layers = self.layers_done
        if not layers:
            return 0.0
        elapsed_ms: float = self.begin.elapsed_time(self.marks[layers - 1])
        return elapsed_ms / 1e3 / layers

    def done(self) -> bool:
        """See ``Transfer.done``."""
        if not self.future.done():
            return False
        raise_failure(self.future)
        if not self.end.query():
            return False
        self.seconds = self.begin.elapsed_time(self.end) / 1e3
        self.held.let_go()
        return True

    def cancel(self) -> None:
        """See ``Transfer.cancel``; waits for the copies that are queued."""
        self._stopped.set()
        if not self.future.cancel():
            self.future.exception()
        self.end.synchronize()
        self.held.let_go()

    def await_layer(self, layer: int) -> None:
        """See ``Incoming.await_layer``."""
        with self._queued:
            self._queued.wait_for(lambda: len(self.marks) > layer or self.future.done())
        if len(self.marks) <= layer:
            raise_failure(self.future)
            raise InvariantError(f"layer {layer} of a copy of {len(self.marks)}")
        torch.cuda.current_stream().wait_event(self.marks[layer])

    def mark(self) -> None:
        """Record that a layer's copies are queued on the current stream."""
        event = timed()
        event.record()
        self.marks.append(event)
        self._tell()

    def run_on(self, thread: ThreadPoolExecutor, job: Callable[[], None]) -> None:
        """Hand the job over; held memory is let go where the thread takes none."""
        try:
            self.future = thread.submit(job)
        except BaseException:
            self.held.let_go()
            raise
        self.future.add_done_callback(lambda _: self._tell())

    def copy_layers(
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
                    self.mark()
            finally:
                self.end.record()

    def _tell(self) -> None:
        with self._queued:
            self._queued.notify_all()
