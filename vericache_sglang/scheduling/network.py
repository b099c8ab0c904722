"""Rings of one server's store link and KV slots, in windows of the clock.

The second admission of the paper's section 5.3: servers of two pools share no
iteration, so a window is a span of time here. Algorithm 1 is that of ``admit``.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from vericache_sglang.scheduling.admit import Admission
from vericache_sglang.scheduling.reservation import Demand, PrefetchDemand
from vericache_sglang.scheduling.ring import WINDOW, Ring

if TYPE_CHECKING:
    from collections.abc import Collection

WINDOW_S = 0.05
"""Length of a window, in seconds."""

WINDOWS = 256
"""W, the windows of a ring."""

STORE_LINK = "store link"
POOL = "pool"


class NetworkRings:
    """Reserved time of the link from the store, and reserved slots of the pool.

    A KV is either reserved (its slot is taken from the first window of its load to its
    verification) or held (its slot is taken until it is released).

    The unit of a slot is the caller's: one of a KV, or a full KV, if any is held.

    Args:
        slots: Slots of the pool, >= 0.

    Attributes:
        held: Requests that hold a slot.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._link, self._pool = Ring(WINDOWS, WINDOW), Ring(WINDOWS, slots)
        rings = {STORE_LINK: self._link, POOL: self._pool}
        self._admission = Admission(rings, WINDOWS)
        self.held: set[str] = set()

    def resize(self, slots: int) -> None:
        """Change the slots of the pool; what is reserved or held stays."""
        self._pool.limit += slots - self._slots
        self._slots = slots

    def free(self, spare: int = 0) -> int:
        """Return the slots that are free in every window.

        Args:
            spare: Slots that verifications keep, reserved or not; >= 0.
        """
        return self._pool.limit - max(spare, *self._pool.horizon())

    @property
    def reserved(self) -> dict[str, float]:
        """Reserved parts: of the link's time, and of the pool in the fullest window."""
        link, pool = self._link.horizon(), self._pool.horizon()
        return {
            STORE_LINK: sum(link) / (WINDOWS * WINDOW),
            POOL: max(pool) / max(1, self._pool.limit),
        }

    def advance(self, now_s: float) -> None:
        """Advance to the window of the time ``now_s``, in seconds."""
        while self._admission.now < int(now_s / WINDOW_S):
            self._admission.slide()

    def hold(self, rid: str, load_s: float, spare: int = 0) -> bool:
        """Take a slot until ``release``, and the first free time of the link.

        A load that is longer than the rings reserves all their windows.

        Args:
            rid: Request id.
            load_s: Time of its load, in seconds, >= 0.
            spare: See ``free``.

        Returns:
            Whether there was room; nothing is taken otherwise.
        """
        load = _load(min(load_s, (WINDOWS - 2) * WINDOW_S), ())
        if self.free(spare) < 1:
            return False
        if self._admission.admit(rid, load, load.span) is None:
            return False
        self._keep(rid)
        return True

    def reserve(
        self, rid: str, load_s: float, eta_s: float, slots: int = 1
    ) -> tuple[float, float] | None:
        """Reserve one verification's load and slot by Algorithm 1.

        Args:
            rid: Request id.
            load_s: Time of its load, in seconds, >= 0.
            eta_s: When its drafts are expected, in seconds from now, >= 0.
            slots: Slots that it needs.

        Returns:
            When the load may start and when it has to be done, in seconds of the time
            given to ``advance``; None where no window has room: busy.
        """
        load = _load(load_s, (Demand(POOL, slots, extra=1),))
        anchor = max(1, int(eta_s / WINDOW_S))
        found = self._admission.admit(rid, load, anchor)
        if found is None:
            return None
        return found.first * WINDOW_S, (found.deadline + 1) * WINDOW_S

    def starts_s(self, rid: str) -> float | None:
        """Return when a request's reserved load may start; None: it has reserved none.

        Returns:
            In seconds of the time given to ``advance``.
        """
        found = self._admission.reservation(rid)
        return None if found is None else found.first * WINDOW_S

    def load_by(self, load_s: float, eta_s: float) -> float | None:
        """Return the end of the load that ``reserve`` would grant; reserves nothing."""
        found = self.reserve("", load_s, eta_s)
        self._admission.cancel("")
        return None if found is None else found[1]

    def begin(self, rid: str) -> bool:
        """Take the reserved slot, as its load begins; False while none is free."""
        if len(self.held) >= self._slots:
            return False
        self._admission.cancel(rid)
        self._keep(rid)
        return True

    def retain(self, rids: Collection[str]) -> None:
        """Release what requests have reserved or hold, but for ``rids``."""
        for rid in self.held.union(self._admission.requests).difference(rids):
            self.release(rid)

    def release(self, rid: str) -> None:
        """Free what the request has reserved or holds; nothing if it has none."""
        self._admission.cancel(rid)
        if rid in self.held:
            self.held.remove(rid)
            self._pool.limit += 1

    def _keep(self, rid: str) -> None:
        self.held.add(rid)
        self._pool.limit -= 1


def _load(load_s: float, demands: tuple[Demand, ...]) -> PrefetchDemand:
    work = ceil(load_s / WINDOW_S * WINDOW)
    span = max(1, -(-work // WINDOW))
    return PrefetchDemand(span, demands, work=Demand(STORE_LINK, work))
