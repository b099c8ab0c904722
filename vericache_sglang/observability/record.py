"""The record of one decode iteration, as its observers receive it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.scheduling.plan import Move

Phase = Literal["draft", "verify", "plain", "wait"]
"""What a request did in an iteration."""


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One request's share of an iteration.

    Attributes:
        rid: Request id.
        phase: What it did.
        tokens: Query tokens of its row: 0 for wait, d + 1 for verify, else 1.
        emitted: Tokens it emitted, 0 to d + 1.
        discarded: The request had ended before the results were known (the overlap
            schedule launches one iteration too many), so nothing of them counts.
    """

    rid: str
    phase: Phase
    tokens: int
    emitted: int
    discarded: bool = False


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One copy over the host link that has ended.

    Attributes:
        rid: Request it was made for.
        direction: "in" for a prefetch into the staging buffer, "out" for an offload.
        nbytes: Bytes moved.
        ended: When its end was noticed; ``time.perf_counter()`` seconds.
        seconds: How long it was on the link.
    """

    rid: str
    direction: Literal["in", "out"]
    nbytes: int
    ended: float
    seconds: float


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """One decode iteration.

    Attributes:
        index: Count of decode iterations since the start of the process, from 1.
        began: Launch; ``time.perf_counter()`` seconds.
        ended: The worker's return to SGLang's scheduler, same clock.
        rows: Every request of the batch.
        moves: Changes of residency made after the forward.
        transfers: Copies whose end was noticed at the start of this iteration.
        reservations: What the rings hold, by ring name: amounts of the current and
            the coming windows (link in microwindows, a millionth of an iteration;
            staging in slots; verify in rows).
    """

    index: int
    began: float
    ended: float
    rows: tuple[RowRecord, ...]
    moves: tuple[Move, ...]
    transfers: tuple[TransferRecord, ...]
    reservations: Mapping[str, tuple[float, ...]]


class Observer(Protocol):
    """Receives every iteration; called through ``Guard``, and must not be slow."""

    def iteration(self, record: IterationRecord) -> None:
        """Record one iteration."""

    def idle(self) -> None:
        """The last request has left; no iteration follows for a while."""

    def close(self) -> None:
        """The process ends; write what is still held."""
