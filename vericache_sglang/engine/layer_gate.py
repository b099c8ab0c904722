"""Lets a forward start before the last layers it reads have arrived."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import InvariantError, TransferError
from vericache_sglang.scheduling.ewma import Ewma

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vericache_sglang.memory.link import Incoming

logger = logging.getLogger(__name__)

LONGEST_S = 1.0
"""Upper bound of a layer's believable time in a forward, in seconds."""


def stands_still_s(
    layers: int, arrived: int, arrival_s: float, forward_s: float
) -> float:
    """Return how long a forward that starts now would wait for a copy, in seconds.

    Layer j arrives after (j + 1 - arrived) * arrival_s and is asked for after
    j * forward_s, both linear in j: what is waited for longest is the first layer that
    is missing, or the last.

    Args:
        layers: L, >= 1.
        arrived: Layers that are there, in [0, L].
        arrival_s: Seconds between two layers' arrivals.
        forward_s: Seconds the forward takes for a layer; too few are on the safe side.
    """
    if arrived >= layers:
        return 0.0
    first = arrival_s - arrived * forward_s
    last = (layers - arrived) * arrival_s - (layers - 1) * forward_s
    return max(0.0, first, last)


def worth_starting(stall_s: float, rows: int, iteration_s: float, users: int) -> bool:
    """Say whether a verification is better started now than an iteration later.

    Every request of the batch stands still; an iteration is saved by those that are
    verified over the copy. Asked again in every iteration, so one is what counts.

    Args:
        stall_s: See ``stands_still_s``.
        rows: Requests of the batch, >= 1.
        iteration_s: Seconds of an iteration; 0 where no forward may start early.
        users: Requests that wait for the copy.
    """
    return iteration_s > 0.0 and stall_s * rows <= iteration_s * users


class ForwardPace:
    """How long forwards take per layer, learned from when layers were asked for.

    On a GPU layers are asked for as they are launched, faster than they run: the value
    is then too small, and a stall is thought longer than it is.

    Attributes:
        layer_s: Seconds per layer; 0.0 until one forward was seen.
    """

    def __init__(self) -> None:
        self._mean = Ewma(0.0, least=0.0, most=LONGEST_S)

    @property
    def layer_s(self) -> float:
        """See the class."""
        return self._mean.value

    def observe(self, seconds: float, steps: int) -> None:
        """Count one forward: what ``steps`` >= 1 layers took."""
        self._mean.observe(seconds / steps)


class LayerGate:
    """Holds each layer of one forward back until the complements it reads are there.

    SGLang's KV pool calls ``wait_until`` of what is registered as its
    ``layer_transfer_counter`` whenever a layer's attention takes its buffers
    (``MHATokenToKVPool.get_key_buffer``), in every attention backend. A replayed CUDA
    graph calls nothing: ``close`` notices.

    A copy that fails meanwhile is noted and waited for no longer; what was computed
    over it is to be thrown away.

    Args:
        copies: Copies under way that the forward reads, by the staging's key.
        layers: L.
        pace: Learns from this forward.

    Attributes:
        failed: Keys of copies that failed.
        stood_still_s: Seconds the caller has waited.
    """

    def __init__(
        self, copies: Mapping[str, Incoming], layers: int, pace: ForwardPace
    ) -> None:
        self.failed: set[str] = set()
        self.stood_still_s = 0.0
        self._copies = dict(copies)
        self._layers = layers
        self._pace = pace
        self._passed = -1
        self._first = 0
        self._began = 0.0

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the copies, in order."""
        return tuple(self._copies)

    @contextmanager
    def over(self, pool: Any) -> Iterator[None]:
        """Stand in front of the layers of ``pool`` for one forward.

        Args:
            pool: SGLang's KV pool; what waited there before does so afterwards.
        """
        before = pool.layer_transfer_counter
        pool.register_layer_transfer_counter(self)
        try:
            yield
        finally:
            pool.register_layer_transfer_counter(before)

    def wait_until(self, layer: int) -> None:
        """See ``wait``; the name SGLang's pool calls."""
        self.wait(layer)

    def wait(self, layer: int) -> None:
        """Return when what the caller reads of a layer next is there, or has failed.

        Args:
            layer: Index in the pool; later than at the last call, or the same.
        """
        if layer <= self._passed:
            return  # keys were asked for, now values are
        now = time.perf_counter()
        if self._passed < 0:
            self._began, self._first = now, layer
        elif layer == self._layers - 1:
            steps = layer - self._first
            self._pace.observe(now - self._began - self.stood_still_s, steps)
        self._passed = layer
        if not self._copies:
            return
        for key, copy in self._copies.items():
            if key in self.failed:
                continue
            try:
                copy.await_layer(layer)
            except TransferError as error:
                logger.error("VeriCache: the copy %s is verified over: %s", key, error)
                self.failed.add(key)
        self.stood_still_s += time.perf_counter() - now

    def close(self) -> None:
        """Check that the forward has asked for every layer.

        Raises:
            InvariantError: It did not, so it may have read what was not there.
        """
        if self._copies and self._passed < self._layers - 1:
            raise InvariantError(
                f"a forward over a complement that was arriving asked for layer "
                f"{self._passed} last, of {self._layers}: its attention does not wait"
            )
