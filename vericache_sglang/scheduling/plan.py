"""What the planner sees of a request, and the frozen records it answers with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """How a request is being decoded.

    PLAIN rows hold their whole KV on the device and emit one exact token an iteration;
    DRAFTING rows hold the draft part, the complement lives on the host.
    """

    PLAIN = "plain"
    DRAFTING = "drafting"


class Staged(Enum):
    """Where a drafting request's complement is on its way to the device."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """One running request as the planner sees it, in batch order.

    Attributes:
        rid: Request id.
        phase: Plain or drafting.
        drafts: Tokens drafted since the last verification.
        target: Drafts after which a verification is wanted, in tokens.
        cap: Most drafts worth having now, in tokens: the draft length, the tokens the
            request may still emit, or ``drafts`` once a stop token was drafted.
        staged: Whether the complement is on the device.
        complement: Complement length, in slots; what staging it takes.
        splittable: A plain row whose prompt may be split in two parts now.
        waited: Iterations this row has been left out while asking to be verified.
        over: Nothing is left to decode; only the request's end is not processed yet.
    """

    rid: str
    phase: Phase
    drafts: int = 0
    target: int = 0
    cap: int = 0
    staged: Staged = Staged.ABSENT
    complement: int = 0
    splittable: bool = False
    waited: int = 0
    over: bool = False


@dataclass(frozen=True, slots=True)
class Plain:
    """Decode one token on the full KV, which is on the device."""

    rid: str


@dataclass(frozen=True, slots=True)
class Split:
    """Split the prompt's KV: draft part stays, complement goes to the host."""

    rid: str


@dataclass(frozen=True, slots=True)
class StageIn:
    """Start copying the complement into the staging region."""

    rid: str


@dataclass(frozen=True, slots=True)
class Draft:
    """Decode one token on the draft row."""

    rid: str


@dataclass(frozen=True, slots=True)
class Verify:
    """Run the drafted tokens over the verify row; the complement is staged."""

    rid: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Leave the request out of this forward: drafts full, reload late."""

    rid: str


Action = Plain | Split | StageIn | Draft | Verify | Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one iteration may spend.

    Attributes:
        max_verifies: Verify rows in one forward.
        max_splits: Prompts split in one iteration.
        staging_spans: Sizes of the free spans of the staging region, in slots, in
            address order.
        lead: Iterations a reload is started before its verification is due.
    """

    max_verifies: int
    max_splits: int
    staging_spans: tuple[int, ...]
    lead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One iteration: preparations first, then exactly one row action per request.

    Attributes:
        splits: Prompts to split after the forward; such a row is decoded plainly in
            this iteration and drafts from the next one on.
        stage_ins: Reloads to start before the forward.
        rows: Plain, Draft, Verify or Wait, one per request, in batch order.
    """

    splits: tuple[Split, ...]
    stage_ins: tuple[StageIn, ...]
    rows: tuple[Plain | Draft | Verify | Wait, ...]
