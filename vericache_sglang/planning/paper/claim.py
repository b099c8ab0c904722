"""One figure that the paper prints, with the value that our functions compute."""

from __future__ import annotations

from dataclasses import dataclass

WIDE_GAP = 0.15
"""Gap, as a share of the paper's figure, above which an explanation is required."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A row of the paper-vs-ours table.

    Attributes:
        what: Description of the figure, with its section of arXiv:2605.17613.
        paper: Value as printed.
        ours: Computed value.
        unit: Unit of both, "x" for a ratio.
        open: Assumptions beside the shared ones, where the paper leaves them open.
        why: Cause of the gap; printed, and required, above ``WIDE_GAP``.
    """

    what: str
    paper: float
    ours: float
    unit: str
    open: str = "-"
    why: str = "-"

    @property
    def gap(self) -> float:
        """Ours over the paper's, minus 1."""
        return self.ours / self.paper - 1

    @property
    def wide(self) -> bool:
        """Whether the gap needs an explanation."""
        return abs(self.gap) > WIDE_GAP

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, in the columns of ``HEADER``."""
        return (
            self.what,
            f"{_rounded(self.paper)} {self.unit}",
            f"{_rounded(self.ours)} {self.unit}",
            f"{self.gap:+.0%}".replace("-0%", "+0%"),
            self.open,
            self.why if self.wide else "-",
        )


HEADER = ("figure", "paper", "ours", "gap", "left open, assumed here", "why the gap")


def table(claims: tuple[Claim, ...]) -> str:
    """Return the claims as a Markdown table."""
    rows = [HEADER, ("---",) * len(HEADER), *(claim.cells() for claim in claims)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _rounded(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}'):g}"
