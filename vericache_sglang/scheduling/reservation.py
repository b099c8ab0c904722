"""Records of what a prefetch and a verification reserve of each ring."""

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
    """Amount that one reservation takes of one ring.

    Attributes:
        ring: The ring's name.
        amount: Amount per iteration, in the ring's unit, >= 0; the sum over all
            iterations where it is a prefetch's ``work``.
        extra: Iterations held beyond the deadline, >= 0. The staging buffer is held
            while the verify forward runs, so ``extra > 0`` marks a ring that holds KV.
    """

    ring: str
    amount: int
    extra: int = 0


@dataclass(frozen=True, slots=True)
class PrefetchDemand:
    """Demands of one residual KV's prefetch and verification; the paper's l_r and S_r.

    The prefetch takes the ``span`` scheduler iterations up to its deadline d. Where
    these have too little free for ``work``, it also takes the iteration before them,
    which another prefetch may use in part.

    Attributes:
        span: S_r >= 1, in iterations.
        demands: Reserved in every iteration of the prefetch, and ``extra`` beyond d.
        point: Reserved in iteration ``d + 1`` alone, where the verification runs; each
            with ``extra`` 0.
        work: Reserved once, from what is free in the prefetch's iterations, the
            earliest first; with ``extra`` 0. None for a prefetch without link time.

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
            raise InvariantError(f"prefetch out of bounds: {self}")
        # Each demand is checked against its ring alone; two on one could exceed it.
        if len({each.ring for each in every}) < len(every):
            raise InvariantError(f"prefetch names a ring twice: {self}")

    def rings(self) -> list[str]:
        """Return the names of the rings it reserves."""
        names = [each.ring for each in (*self.demands, *self.point)]
        return names if self.work is None else [*names, self.work.ring]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Reservation of one request's next verification; iterations are absolute.

    Attributes:
        rid: Request id.
        first: Iteration in which the transfer starts.
        deadline: Last iteration of drafting and of the transfer; the verification runs
            in the next one.
        prefetch: Demands of the transfer and of the verification.
        leader: Request whose transfer this one shares; None when it has its own.
    """

    rid: str
    first: int
    deadline: int
    prefetch: PrefetchDemand
    leader: str | None = None


@dataclass(slots=True)
class RingLoad:
    """One transfer and the requests that share it; reserved until the last one ends.

    Attributes:
        first: Its first iteration, absolute.
        deadline: Its last iteration.
        prefetch: Demands of the request that started it.
        worked: Link time reserved in each of its iterations, from the first; empty when
            it has no work.
        readers: Deadlines by request id, the oldest request first.
    """

    first: int
    deadline: int
    prefetch: PrefetchDemand
    worked: tuple[int, ...] = ()
    readers: dict[str, int] = field(default_factory=dict)

    def furthest(self) -> int:
        """Return the latest deadline of the readers."""
        return max(self.readers.values())

    def held(self) -> list[Demand]:
        """Return the demands on rings that hold KV until the last verification."""
        return [demand for demand in self.prefetch.demands if demand.extra]

    def end(self, demand: Demand, furthest: int) -> int:
        """Return the last iteration of ``demand`` for the deadline ``furthest``."""
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
    """Return the demands of one prefetch on the rings LINK, STAGING and VERIFY.

    The printed Algorithm 1 (arXiv:2605.17613, section 5) reserves equal parts of
    l_r / S_r in each iteration of both rings. Two prefetches of 1.5 iterations then
    cannot share an iteration, and a quarter of the link stays idle. Link time is
    therefore reserved exactly, as work that fills what is free.

    Args:
        bytes_: Size of the transfer, in bytes, >= 0.
        link_bytes_per_s: BW, > 0.
        iteration_s: T_iter, in seconds, > 0.
        slots: Size of the residual KV in the staging buffer, in KV slots, >= 0.
        verify_rows: Rows of the verify forward, >= 0.
        even: Reserve the printed algorithm's equal parts instead, for comparison.

    Returns:
        l_r = bytes / (BW * T_iter) iterations of link time, in microwindows rounded up,
        in S_r = max(1, ceil(l_r)) iterations.

    Raises:
        InvariantError: An argument is out of bounds.
    """
    per_window = link_bytes_per_s * iteration_s
    if bytes_ < 0 or not per_window > 0 or not isfinite(per_window):
        raise InvariantError(
            f"{bytes_} bytes at {link_bytes_per_s} bytes/s, {iteration_s} s a window"
        )
    # Integers from here on: ceil(ceil(l * n) / n) == ceil(l), and no rounding error
    # makes a part exceed an iteration.
    total = ceil(bytes_ / per_window * WINDOW)
    span = max(1, -(-total // WINDOW))
    staging = Demand(STAGING, slots, extra=1)
    point = (Demand(VERIFY, verify_rows),)
    if even:
        return PrefetchDemand(span, (Demand(LINK, -(-total // span)), staging), point)
    return PrefetchDemand(span, (staging,), point, Demand(LINK, total))
