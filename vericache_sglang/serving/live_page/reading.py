"""One look at a scheduler: what the page shows, read from its internal state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = "vericache"
"""Name of our report in SGLang's internal state (patches: managers_scheduler)."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One running request; fields as ``Watch.report`` names them.

    Attributes:
        rid: Request id; clients choose it, so it is not to be trusted.
        phase: What it did last: draft, verify, plain, wait; parked where it is.
        drafts: Tokens drafted since the last verification, >= 0.
        most: Drafts at which it waits for its verification; 0 where it does not draft.
        prompt: Tokens prefilled.
        emitted: Tokens emitted since.
        residency: Where its complement is: device, host, parked.
        acceptance: Estimated probability that its next draft is accepted, in [0, 1].
    """

    rid: str
    phase: str
    drafts: int
    most: int
    prompt: int
    emitted: int
    residency: str
    acceptance: float


@dataclass(frozen=True, slots=True)
class RingLevels:
    """What one ring has promised.

    Attributes:
        name: Its name: link, staging, verify.
        limit: Most of one window, in the ring's unit, >= 0.
        windows: Reserved in each window, the current one first, in the same unit.
    """

    name: str
    limit: float
    windows: tuple[float, ...]

    def shares(self) -> tuple[float, ...]:
        """Return the reserved share of every window, in [0, 1]; 0 without a limit."""
        if self.limit <= 0:
            return (0.0,) * len(self.windows)
        return tuple(min(1.0, used / self.limit) for used in self.windows)


@dataclass(frozen=True, slots=True)
class Reading:
    """One scheduler at one moment.

    Attributes:
        model: Name the model is served under; "" where the state has none.
        enabled: VeriCache is on.
        figures: The flat counters of the report, by name.
        lanes: Running requests, at most as many as the report has.
        rings: Empty where nothing is reserved ahead.
        tokens_per_s: Decoded lately; None where too little was seen to say.
    """

    model: str = ""
    enabled: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)
    lanes: tuple[Lane, ...] = ()
    rings: tuple[RingLevels, ...] = ()
    tokens_per_s: float | None = None

    @property
    def decoded(self) -> int:
        """Tokens decoded since the start of the process.

        A verification emits its accepted drafts and one token of its own, a plain row
        one; prefills are not counted.
        """
        names = ("accepted", "rounds", "plain_rows")
        return int(sum(self.figures.get(name, 0) for name in names))


def read_state(state: Mapping[str, Any]) -> Reading:
    """Pick what the page shows out of a scheduler's internal state.

    The state also holds every server argument, API keys included: only what is named
    here leaves it.

    Args:
        state: One entry of ``TokenizerManager.get_internal_state()``.
    """
    report = state.get(KEY)
    model = str(state.get("served_model_name") or state.get("model_path") or "")
    if report is None:
        return Reading(model)
    return Reading(
        model=model,
        enabled=True,
        figures={
            name: value
            for name, value in report.items()
            if isinstance(value, int | float)
        },
        lanes=tuple(Lane(**lane) for lane in report.get("lanes", ())),
        rings=tuple(
            RingLevels(name, ring["limit"], tuple(ring["windows"]))
            for name, ring in report.get("rings", {}).items()
        ),
    )
