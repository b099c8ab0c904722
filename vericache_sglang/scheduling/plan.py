"""What the runtime is told, and the frozen plans it returns."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Residency(Enum):
    """Where a request's residual KV is: in exactly one place.

    DEVICE: in the KV pool; a verification needs no transfer. HOST: in host memory; a
    verification needs a prefetch. SWAPPED: the draft KV is in host memory too; the
    request is paused. STORE: it is in the store; the request drafts, and is
    verified once it was read, or by another server.
    """

    DEVICE = "device"
    HOST = "host"
    SWAPPED = "swapped_out"
    STORE = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """Sizes and limits of a request when its decoding starts.

    Attributes:
        rid: Request id.
        prompt: Prompt tokens, T.
        kept: KV slots of the draft KV once compressed, which are beside the full KV
            where that stays on the device.
        dropped: KV slots that an uncompressed prompt frees if its residual KV goes to
            the host.
        staged: KV slots of the prefetched residual KV; 0: ``dropped``. More where the
            draft KV is packed: a verification reads every token unpacked.
        carried: Bytes of the residual KV on link and host, in KV slots; 0: ``staged``.
        reads: Unpacked slots that cost as much to read as the draft KV; 0: ``kept``.
        remaining: Tokens it may still emit, >= 0.
        longest: Most drafts between two of its verifications, >= 1.
        ready_in: Decode iterations before its prompt may be compressed.
        compressible: Whether its prompt may be compressed at all.
        proposals: Most tokens that an inner drafter may propose in one of its rows.
    """

    rid: str
    prompt: int
    kept: int
    dropped: int
    staged: int = 0
    carried: int = 0
    reads: int = 0
    remaining: int
    longest: int = 1 << 30
    ready_in: int = 0
    compressible: bool = True
    proposals: int = 0

    def __post_init__(self) -> None:
        staged = self.staged or self.dropped
        object.__setattr__(self, "staged", staged)
        object.__setattr__(self, "carried", self.carried or staged)
        object.__setattr__(self, "reads", self.reads or self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerInput:
    """Free memory, and what changed since the last plan.

    Attributes:
        free_slots: KV slots free or evictable on the device.
        host_slots: KV slots that still fit the host budget.
        rows: Running requests, including those that never speculate.
        blocked: Whether waiting requests lack device memory.
        arrived: Requests whose residual KV has arrived in the staging buffer.
        failed: Requests whose prefetch failed.
        complete: Requests whose residual KV has been read from the store.
        proposals: Most tokens that an inner drafter may propose per row.
        unready: Requests for which it cannot propose yet.
    """

    free_slots: int
    host_slots: int
    rows: int
    blocked: bool = False
    arrived: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    complete: tuple[str, ...] = ()
    proposals: int = 0
    unready: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a plan could not foresee of one row.

    Attributes:
        rid: Request id.
        drafted: Drafts of an emitting row, >= 0, or tokens that a draft row drafted,
            >= 1.
        emitted: Accepted tokens and the one after them, in
            [1, drafted + proposed + 1]; 0: a draft row.
        proposed: Further tokens that the row ran: proposals of an inner drafter behind
            the drafts of an emitting row, or behind the last token of a draft row.
        ended: The row drafted a token that would end the request, so further drafts
            are useless.
    """

    rid: str
    drafted: int = 0
    emitted: int = 0
    proposed: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Compress:
    """Compress the prompt: keep draft KV, and place residual KV in ``residency``."""

    rid: str
    residency: Residency


@dataclass(frozen=True, slots=True)
class Restore:
    """Fall back to full KV: free the draft KV's copies, decode autoregressively."""

    rid: str


@dataclass(frozen=True, slots=True)
class Offload:
    """Move the residual KV from the device to the host."""

    rid: str


@dataclass(frozen=True, slots=True)
class Load:
    """Move the residual KV from the host to the device."""

    rid: str


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Move the request's KV on the device to the host; the request pauses."""

    rid: str


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Move a swapped-out request's KV back to the device; no prefill is needed."""

    rid: str


@dataclass(frozen=True, slots=True)
class Complete:
    """Take over the residual KV that has been read from the store to the host."""

    rid: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start copying the residual KV into the staging buffer."""

    rid: str


@dataclass(frozen=True, slots=True)
class Plain:
    """Decode autoregressively; the full KV is on the device.

    Attributes:
        rid: Request id.
        proposals: Tokens that the inner drafter proposes behind the pending one.
    """

    rid: str
    proposals: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft on the draft KV: one token, and the proposals that it agrees with.

    Attributes:
        rid: Request id.
        proposals: Tokens that the inner drafter proposes behind the last draft.
    """

    rid: str
    proposals: int = 0


@dataclass(frozen=True, slots=True)
class Verify:
    """Verify the drafts on the full KV; the residual KV is on the device.

    Attributes:
        rid: Request id.
        proposals: Tokens that the inner drafter proposes behind the last draft.
    """

    rid: str
    proposals: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
    """Skip this forward: draft limit reached, prefetch late, or swapped out."""

    rid: str


@dataclass(frozen=True, slots=True)
class Deliver(Wait):
    """Skip this forward, and emit tokens that another server has decided.

    Attributes:
        drafts: Drafts that were sent to it.
        seconds: Since they were sent; 0.0 for tokens that were not asked for.
        logprobs: One per token if the request wants them.
    """

    tokens: tuple[int, ...]
    drafts: int = 0
    seconds: float = 0.0
    logprobs: tuple[Any, ...] = ()


Move = Compress | Restore | Offload | Load | SwapOut | SwapIn | Complete
RowAction = Plain | Draft | Verify | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One scheduler iteration: prefetches first, then one forward, then the moves.

    Attributes:
        iteration: Index of the iteration, one more per plan.
        abandoned: Requests whose prefetches failed too often; they are prefilled again
            and tracked no more.
        stage_ins: Prefetches to start before the forward.
        rows: One action per tracked request, by request id.
        moves: KV moves to make after the forward, in order; the executor reports each
            with ``Runtime.moved`` or ``Runtime.refused``.
    """

    iteration: int
    abandoned: tuple[str, ...] = ()
    stage_ins: tuple[Prefetch, ...]
    rows: dict[str, RowAction]
    moves: tuple[Move, ...]
