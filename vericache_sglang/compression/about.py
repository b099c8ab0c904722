"""Description of a compression method: paper, kind, mode, scenarios and licence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["drop", "quantize", "split"]
Mode = Literal["offline", "online"]
Scenario = Literal["long-context", "remote-prefix"]

BOTH: tuple[Scenario, ...] = ("long-context", "remote-prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A method's origin and supported scenarios; listed for users, checked at boot.

    Attributes:
        paper: Title or method name, and arXiv id or venue; "" where there is none.
        kind: Whether it drops tokens, quantizes them, or splits their bits.
        mode: ``online``: scores during the prefill; ``offline``: runs further forwards
            over the finished prompt.
        scenarios: Paper section 4.2: ``long-context`` is one server; ``remote-prefix``
            shares a prefix before the question is known, which rules out methods that
            look at the question.
        licence: Of the published reference implementation, and that ours shares no code
            with it where that matters.
    """

    paper: str = ""
    kind: Kind = "drop"
    mode: Mode = "online"
    scenarios: tuple[Scenario, ...] = BOTH
    licence: str = ""


UNKNOWN = About()
