"""What the runtime is told of the world, and the frozen records it answers with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Residency(Enum):
    """Where a request's complement is: in exactly one place.

    DEVICE: in the KV pool; verifying is free. HOST: in host memory; a verification
    stages it first. PARKED: the draft part has left the device too; nothing runs.
    """

    DEVICE = "device"
    HOST = "host"
    SWAPPED = "parked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the runtime needs to know of a request when its decoding starts.

    Attributes:
        rid: Request id.
        prompt: Prompt tokens, T.
        kept: Slots of the draft part once split.
        dropped: Slots that leave the device with the complement.
        copies: Slots a split on the device takes beyond the prompt's own.
        staged: Slots the complement takes when it is back; 0: as many as left. More
            where the draft part is packed: a verification reads every token exactly.
        carried: Its bytes on link and host, in slots; 0: as ``staged``.
        reads: Exact slots that cost as much to read as the draft part; 0: ``kept``.
        remaining: Tokens it may still emit, >= 0.
        longest: Most drafts between two of its verifications, >= 1.
        ready_in: Decode iterations before its prompt may be split.
    """

    rid: str
    prompt: int
    kept: int
    dropped: int
    copies: int = 0
    staged: int = 0
    carried: int = 0
    reads: int = 0
    remaining: int
    longest: int = 1 << 30
    ready_in: int = 0

    def __post_init__(self) -> None:
        staged = self.staged or self.dropped
        object.__setattr__(self, "staged", staged)
        object.__setattr__(self, "carried", self.carried or staged)
        object.__setattr__(self, "reads", self.reads or self.kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What changed outside since the last plan, and how much room there is.

    Attributes:
        free_slots: KV slots free or evictable on the device.
        host_slots: KV slots that still fit the host budget.
        rows: Running requests, those included that are never drafted for.
        blocked: Requests wait for device memory.
        arrived: Requests whose complement is staged now.
        failed: Requests whose reload failed.
    """

    free_slots: int
    host_slots: int
    rows: int
    blocked: bool = False
    arrived: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Compress:
    """Split the prompt's KV in two parts, the complement going to ``residency``."""

    rid: str
    residency: Residency


@dataclass(frozen=True, slots=True)
class Restore:
    """Give the draft part's copies up; decode plainly on the whole KV."""

    rid: str


@dataclass(frozen=True, slots=True)
class Offload:
    """Move the complement from the device to the host."""

    rid: str


@dataclass(frozen=True, slots=True)
class Load:
    """Move the complement from the host to the device."""

    rid: str


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Move what is left on the device to the host; the request pauses."""

    rid: str


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Bring a parked request's device part back; it goes on without a prefill."""

    rid: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start copying the complement into the staging region."""

    rid: str


@dataclass(frozen=True, slots=True)
class Plain:
    """Decode one token on the full KV, which is on the device."""

    rid: str


@dataclass(frozen=True, slots=True)
class Draft:
    """Decode one token on the draft part."""

    rid: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Run the drafted tokens over both parts; the complement is on the device."""

    rid: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Leave the request out of this forward: drafts full, reload late, or parked."""

    rid: str


Move = Compress | Restore | Offload | Load | SwapOut | SwapIn
RowAction = Plain | Draft | Verify | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One iteration: reloads first, then one forward, then the moves.

    Attributes:
        iteration: Counts up by one per plan.
        stage_ins: Reloads to start before the forward.
        rows: One action per request that arrived, by request id.
        moves: Changes of residency to make after the forward, in order; the executor
            answers each with ``Runtime.moved`` or ``Runtime.refused``.
    """

    iteration: int
    stage_ins: tuple[Prefetch, ...]
    rows: dict[str, RowAction]
    moves: tuple[Move, ...]
