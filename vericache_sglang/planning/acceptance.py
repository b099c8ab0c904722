"""Acceptance curves gamma(x, c): accepted drafts as a share of drafted tokens.

arXiv:2605.17613 plots gamma(x, c) and states a few points of it: at c = 1/4 and x = 30,
"~23" accepted drafts on Llama-70B (its rate stays "above ~0.8") and "~19" on Qwen-32B
(section 4.2). All else here is an assumption: each draft is accepted with the same
probability at every position, and the dependence of that probability on c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vericache_sglang.errors import ConfigError


class AcceptanceCurve(Protocol):
    """Expected accepted drafts of one cycle: gamma(x, c) times x."""

    def accepted(self, draft_length: int, keep: float) -> float:
        """Return the expected accepted drafts, without the bonus token.

        Args:
            draft_length: x, in tokens, >= 1.
            keep: c, share of the KV that drafts read, in (0, 1].

        Returns:
            A number in [0, draft_length].
        """


@dataclass(frozen=True, slots=True)
class Geometric:
    """Each draft is accepted with the same probability, at every keep share.

    Attributes:
        survival: p in [0, 1]; E[accepted] = p + p^2 + ... + p^x.
    """

    survival: float

    def __post_init__(self) -> None:
        _check_survival(self.survival)

    def accepted(self, draft_length: int, keep: float) -> float:
        """See ``AcceptanceCurve.accepted``; ``keep`` is ignored."""
        return _geometric_sum(self.survival, draft_length)


@dataclass(frozen=True, slots=True)
class MissByKeep:
    """Geometric, with a miss probability proportional to (1 - c) / c: an assumption.

    The ratio is 0 at c = 1 and grows without bound towards c = 0. Replace it by a curve
    measured on your own model.

    Attributes:
        survival: p at ``at_keep``, in [0, 1].
        at_keep: Keep share to which ``survival`` applies, in (0, 1).
    """

    survival: float
    at_keep: float = 0.25

    def __post_init__(self) -> None:
        _check_survival(self.survival)
        if not 0 < self.at_keep < 1:
            raise ConfigError(f"at_keep must be in (0, 1), got {self.at_keep}")

    def accepted(self, draft_length: int, keep: float) -> float:
        """See ``AcceptanceCurve.accepted``."""
        scale = ((1 - keep) / keep) / ((1 - self.at_keep) / self.at_keep)
        survival = max(0.0, 1 - (1 - self.survival) * scale)
        return _geometric_sum(survival, draft_length)


@dataclass(frozen=True, slots=True)
class EndingAnswers:
    """Another curve, reduced for the last cycle of an answer, which its end truncates.

    An answer ends anywhere in its last cycle, so half a cycle is lost on average.

    Attributes:
        curve: Acceptance inside an answer.
        output_tokens: Length of each answer, in tokens, >= 1.
    """

    curve: AcceptanceCurve
    output_tokens: int

    def __post_init__(self) -> None:
        if self.output_tokens < 1:
            raise ConfigError(f"--output must be >= 1 token, got {self.output_tokens}")

    def accepted(self, draft_length: int, keep: float) -> float:
        """See ``AcceptanceCurve.accepted``; a mean over the cycles of one answer."""
        full_cycle = self.curve.accepted(draft_length, keep) + 1
        cycles = max(1.0, self.output_tokens / full_cycle + 0.5)
        return max(0.0, self.output_tokens / cycles - 1)


def survival_for(accepted: float, draft_length: int) -> float:
    """Return the p whose geometric curve has ``accepted`` drafts at ``draft_length``.

    Raises:
        ConfigError: ``accepted`` is outside [0, draft_length].
    """
    if not 0 <= accepted <= draft_length:
        raise ConfigError(f"{accepted} of {draft_length} drafts cannot be accepted")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _geometric_sum(middle, draft_length) < accepted:
            low = middle
        else:
            high = middle
    return high


def _geometric_sum(survival: float, draft_length: int) -> float:
    if survival == 1:
        return float(draft_length)
    # Rounding may make the closed form exceed x for p just below 1.
    total = survival * (1 - survival**draft_length) / (1 - survival)
    return min(total, float(draft_length))


def _check_survival(survival: float) -> None:
    if not 0 <= survival <= 1:
        raise ConfigError(f"--accept must be in [0, 1], got {survival}")


PUBLISHED_LLAMA_70B = survival_for(23, 30)
"""p of "~23 of 30" at c = 1/4, Llama-70B (arXiv:2605.17613 section 4.2)."""

PUBLISHED_QWEN_32B = survival_for(19, 30)
"""p of "~19 of 30" at c = 1/4, Qwen-32B (arXiv:2605.17613 section 4.2)."""
