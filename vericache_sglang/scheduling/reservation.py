"""What a verification reserves: the records that Admit books, and how they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, isfinite

from vericache_sglang.errors import InvariantError
from vericache_sglang.scheduling.ring import WINDOW

LINK = "link"
STAGING = "staging"
VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one reservation takes of one ring.

    Attributes:
        ring: The ring's name.
        amount: Taken of each window, in the ring's unit, >= 0; of all windows together
            where it is a reload's ``work``.
        extra: Windows held beyond the deadline, >= 0. Staging is held while the verify
            forward runs, so a ring with ``extra > 0`` is one that holds KV.
    """

    ring: str
    amount: int
    extra: int = 0


@dataclass(frozen=True, slots=True)
class PrefetchDemand:
    """What bringing one complement back takes; l_r and S_r of the paper.

    It takes the ``span`` windows up to its deadline d. Where these have too little free
    for ``work`` it takes one window more, the one a neighbour's reload left in part.

    Attributes:
        span: S_r >= 1, in windows.
        demands: Taken over every window of the reload, and ``extra`` beyond d.
        point: Taken in window ``d + 1`` alone, where the verification runs; each with
            ``extra`` 0.
        work: Taken once, of whatever is free in the reload's windows, the earliest
            first; with ``extra`` 0. None for a reload without work.

    Raises:
        InvariantError: An amount, ``extra`` or the span is out of bounds, or a ring is
            named twice.
    """

    span: int
    demands: tuple[Demand, ...]
    point: tuple[Demand, ...] = ()
    work: Demand | None = None

    def __post_init__(self) -> None:
        once = self.point if self.work is None else (*self.point, self.work)
        every = (*self.demands, *once)
        if (
            self.span < 1
            or any(min(each.amount, each.extra) < 0 for each in every)
            or any(each.extra for each in once)
        ):
            raise InvariantError(f"reload out of bounds: {self}")
        # Each demand is checked against its ring alone; two on one would overbook it.
        if len({each.ring for each in every}) < len(every):
            raise InvariantError(f"reload names a ring twice: {self}")

    def rings(self) -> list[str]:
        """Return the names of the rings it takes something of."""
        names = [each.ring for each in (*self.demands, *self.point)]
        return names if self.work is None else [*names, self.work.ring]


@dataclass(frozen=True, slots=True)
class Reservation:
    """One request's next verification; windows are absolute.

    Attributes:
        rid: Request id.
        first: Window in which the transfer starts.
        deadline: Last window of drafting and of the transfer; the verification runs in
            the next one.
        prefetch: What is transferred, and what the verification takes.
        leader: Request whose transfer this one reads; None when it has its own.
    """

    rid: str
    first: int
    deadline: int
    prefetch: PrefetchDemand
    leader: str | None = None


@dataclass(slots=True)
class RingLoad:
    """One transfer and the requests that read it; booked until the last has left.

    Attributes:
        first: Its first window, absolute.
        deadline: Its last window.
        prefetch: As the request that started it asked.
        worked: What its work takes of each of its windows, from the first; empty when
            it has none.
        readers: Deadlines by request id, the oldest request first.
    """

    first: int
    deadline: int
    prefetch: PrefetchDemand
    worked: tuple[int, ...] = ()
    readers: dict[str, int] = field(default_factory=dict)

    def furthest(self) -> int:
        """Return the latest deadline of a reader."""
        return max(self.readers.values())

    def held(self) -> list[Demand]:
        """Return the demands on rings that hold KV until the last reader is through."""
        return [demand for demand in self.prefetch.demands if demand.extra]

    def end(self, demand: Demand, furthest: int) -> int:
        """Return the last window ``demand`` takes when ``furthest`` is the deadline."""
        return furthest + demand.extra if demand.extra else self.deadline


def prefetch_of(
    *,
    bytes_: int,
    link_bytes_per_s: float,
    iteration_s: float,
    slots: int,
    verify_rows: int = 1,
    even: bool = False,
) -> PrefetchDemand:
    """Return the reload of one complement over the rings LINK, STAGING and VERIFY.

    The printed Algorithm 1 (arXiv:2605.17613, section 5) checks the same windows of
    both rings; taken as equal parts of l_r / S_r a window, two reloads of 1.5 windows
    cannot share one and a quarter of the link stays idle. Link time is therefore booked
    exactly, as work that fills what is free.

    Args:
        bytes_: What the link moves, in bytes, >= 0.
        link_bytes_per_s: BW, > 0.
        iteration_s: T_iter, in seconds, > 0.
        slots: What the complement occupies on the device, in KV slots, >= 0.
        verify_rows: Rows of the verify forward, >= 0.
        even: Book the printed rule's equal parts instead, for comparison.

    Returns:
        l_r = bytes / (BW * T_iter) windows of link time, in microwindows rounded up,
        in S_r = max(1, ceil(l_r)) windows.

    Raises:
        InvariantError: An argument is out of bounds.
    """
    per_window = link_bytes_per_s * iteration_s
    if bytes_ < 0 or not per_window > 0 or not isfinite(per_window):
        raise InvariantError(
            f"{bytes_} bytes at {link_bytes_per_s} bytes/s, {iteration_s} s a window"
        )
    # Integers from here on: ceil(ceil(l * n) / n) == ceil(l), and no part can exceed
    # a window by a rounding error.
    total = ceil(bytes_ / per_window * WINDOW)
    span = max(1, -(-total // WINDOW))
    staging = Demand(STAGING, slots, extra=1)
    point = (Demand(VERIFY, verify_rows),)
    if even:
        return PrefetchDemand(span, (Demand(LINK, -(-total // span)), staging), point)
    return PrefetchDemand(span, (staging,), point, Demand(LINK, total))
