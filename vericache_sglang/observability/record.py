"""Records of one decode iteration, as observers receive them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.scheduling.plan import Move

Phase = Literal["draft", "verify", "plain", "wait"]
"""Action of a request in an iteration."""


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One request's share of an iteration.

    Attributes:
        rid: Request id.
        tokens: Query tokens of its row: 0 for wait, d + 1 for verify, else 1; and the
            proposals of an inner drafter.
        emitted: Tokens emitted, at most ``tokens``; more if a verifier has decided
            them.
        discarded: Whether the request had ended before the results were known (the
            overlap schedule launches one iteration too many), so that they are ignored.
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
        rid: Request of the copy.
        direction: "in" for a prefetch into the staging buffer, "out" for an offload.
        nbytes: Bytes copied.
        ended: Time at which its end was observed; ``time.perf_counter()`` seconds.
        seconds: Duration of the copy, in seconds.
    """

    rid: str
    direction: Literal["in", "out"]
    nbytes: int
    ended: float
    seconds: float


@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """Tokens that a verifier decided for a drafter's request.

    Attributes:
        rid: Request id.
        drafts: Drafts that were sent to it.
        tokens: Tokens that are emitted.
        seconds: Since the drafts were sent.
    """

    rid: str
    drafts: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """One decode iteration.

    Attributes:
        index: Count of decode iterations since the start of the process, from 1.
        began: Time of the launch; ``time.perf_counter()`` seconds.
        ended: Time of the worker's return to SGLang's scheduler, same clock.
        rows: Every request of the batch.
        moves: KV moves made after the forward.
        transfers: Copies whose end was observed at the start of this iteration.
        reservations: Ring name -> reserved amounts of the current and the following
            iterations (link in microwindows, a millionth of an iteration; staging in
            KV slots; verify in rows).
        verdicts: Of verifiers, for rows that wait and emit in this iteration.
    """

    index: int
    began: float
    ended: float
    rows: tuple[RowRecord, ...]
    moves: tuple[Move, ...]
    transfers: tuple[TransferRecord, ...]
    reservations: Mapping[str, tuple[float, ...]]
    verdicts: tuple[VerdictRecord, ...] = ()


class Observer(Protocol):
    """Receives every iteration, through ``Guard``; must be fast."""

    def iteration(self, record: IterationRecord) -> None:
        """Record one iteration."""

    def idle(self) -> None:
        """Handle an idle server: the last request has ended."""

    def close(self) -> None:
        """Write all buffered data; the process ends."""
