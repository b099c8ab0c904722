"""Complements travelling to the staging region, beside the forwards that draft."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Protocol

import torch

from vericache_sglang.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vericache_sglang.memory.complement import Complement
    from vericache_sglang.memory.staging import Span

GIB = 1 << 30


class Transfer(Protocol):
    """One complement on its way; polled by the engine, never waited for."""

    seconds: float
    """Time the copy took; 0.0 until it is done."""

    def done(self) -> bool:
        """Say whether every byte is in place.

        Raises:
            TransferError: The copy failed, or a checksum did not match.
        """

    def cancel(self) -> None:
        """Stop when convenient; returns only when no byte will be written any more."""


class Transfers(Protocol):
    """Starts copies into the staging region."""

    def start(self, complement: Complement, span: Span) -> Transfer:
        """Copy ``complement`` into the slots of ``span``, every layer."""

    def close(self) -> None:
        """Finish what runs and release threads or streams."""


@dataclass(slots=True)
class ThreadTransfer:
    """See ``Transfer``; the state of one job of ``ThreadTransfers``."""

    stopped: Event
    future: Future[float] | None = None
    seconds: float = 0.0

    def done(self) -> bool:
        """See ``Transfer.done``."""
        if self.future is None or not self.future.done():
            return False
        self.seconds = self.future.result()
        return True

    def cancel(self) -> None:
        """See ``Transfer.cancel``; waits at most for one layer."""
        self.stopped.set()
        if self.future is not None and not self.future.cancel():
            self.future.exception()


class ThreadTransfers:
    """A memcpy thread: the host link of a machine without a GPU.

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
        self._link_gbps = link_gbps
        # One thread: a link carries one copy at a time, in the order they were asked.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vericache-link")

    def start(self, complement: Complement, span: Span) -> ThreadTransfer:
        """See ``Transfers.start``."""
        transfer = ThreadTransfer(Event())
        transfer.future = self._thread.submit(
            self._copy, complement, span, transfer.stopped
        )
        return transfer

    def close(self) -> None:
        """See ``Transfers.close``."""
        self._thread.shutdown()

    def _copy(self, complement: Complement, span: Span, stopped: Event) -> float:
        began = time.perf_counter()
        sent = 0
        for layer in range(len(self._keys)):
            if stopped.is_set():
                raise TransferError("cancelled")
            complement.verify(layer)
            for buffers, source in (
                (self._keys, complement.keys),
                (self._values, complement.values),
            ):
                target = buffers[layer][span.start : span.start + span.slots]
                # numpy's copy is one memcpy without the interpreter lock; a torch
                # copy would start a second team of OpenMP threads beside the forward.
                target.view(torch.uint8).numpy()[:] = (
                    source[layer].view(torch.uint8).numpy()
                )
                sent += source[layer].nbytes
            if self._link_gbps:
                due = began + sent / (self._link_gbps * 1e9)
                time.sleep(max(0.0, due - time.perf_counter()))
        return time.perf_counter() - began


@dataclass(slots=True)
class StreamTransfer:
    """See ``Transfer``; a job that queues copies between two CUDA events."""

    future: Future[tuple[torch.cuda.Event, torch.cuda.Event]]
    seconds: float = 0.0

    def done(self) -> bool:
        """See ``Transfer.done``."""
        if not self.future.done():
            return False
        begin, end = self.future.result()
        if not end.query():
            return False
        self.seconds = begin.elapsed_time(end) / 1e3
        return True

    def cancel(self) -> None:
        """See ``Transfer.cancel``."""
        if self.future.cancel() or self.future.exception() is not None:
            return
        self.future.result()[1].synchronize()


class StreamTransfers:
    """The copy engine of a CUDA device, on a stream of its own.

    A thread checks each layer's checksum and queues its copy, so that the checks run
    ahead of the link. Not yet run on a device.

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

    def start(self, complement: Complement, span: Span) -> StreamTransfer:
        """See ``Transfers.start``; pinned, K and V of each layer in one piece."""
        # The span may still be read by a forward that was launched before.
        free = torch.cuda.Event()
        free.record()
        return StreamTransfer(self._thread.submit(self._copy, complement, span, free))

    def close(self) -> None:
        """See ``Transfers.close``."""
        self._thread.shutdown()
        self._stream.synchronize()

    def _copy(
        self, complement: Complement, span: Span, free: torch.cuda.Event
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        rows = slice(span.start, span.start + span.slots)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(free)
            begin.record()
            for layer in range(len(self._keys)):
                complement.verify(layer)
                for buffers, source in (
                    (self._keys, complement.keys),
                    (self._values, complement.values),
                ):
                    buffers[layer][rows].copy_(source[layer], non_blocking=True)
            end.record()
        return begin, end
