"""Bars and areas as inline SVG; colours come from the style sheet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_STEPS = 128
"""Steps of an area at most; more cannot be told apart, and are sent every second."""


def bar(share: float) -> str:
    """Draw a horizontal bar; what it means is said beside it, in words.

    Args:
        share: Filled part; cut to [0, 1].
    """
    filled = 100.0 * min(1.0, max(0.0, share))
    return (
        '<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" '
        'aria-hidden="true"><rect class="rail" width="100" height="1"/>'
        f'<rect class="fill" width="{filled:.4g}" height="1"/></svg>'
    )


def merge(shares: Sequence[float], most: int = MOST_STEPS) -> list[float]:
    """Merge neighbours until at most ``most`` are left; the largest of them stays."""
    width = -(-len(shares) // most)
    return [max(shares[i : i + width]) for i in range(0, len(shares), max(1, width))]


def area(shares: Sequence[float], label: str) -> str:
    """Draw a row of upright bars without gaps.

    Args:
        shares: Heights in [0, 1], from left to right.
        label: The same in words, for those who do not see it; no markup.
    """
    steps = merge(shares)
    path = "".join(f"V{100.0 * (1.0 - share):.4g}h1" for share in steps)
    width = max(1, len(steps))
    return (
        f'<svg class="area" viewBox="0 0 {width} 100" preserveAspectRatio="none" '
        f'role="img" aria-label="{label}">'
        f'<rect class="rail" width="{width}" height="100"/>'
        f'<path class="fill" d="M0 100{path}V100Z"/></svg>'
    )
