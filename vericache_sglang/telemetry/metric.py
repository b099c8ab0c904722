"""One Prometheus metric of ours, and short ways to write it down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

Sources = tuple[tuple[str, str], ...]
"""(label value, key of the worker's report); "" stands for no label."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    Attributes:
        name: Its Prometheus name; counters end in ``_total``.
        kind: Its Prometheus type.
        unit: What one is of, or "ratio" (0 to 1).
        help: One sentence.
        sources: Where the values come from; empty for a histogram, which is fed from
            the rows of iterations.
        label: Name of the label of its own; "" for none.
        rings: Only pacing over reserve rings (``staggered``) has it.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    sources: Sources = ()
    label: str = ""
    rings: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the worker's report that it reads."""
        return tuple(key for _, key in self.sources)

    @property
    def documentation(self) -> str:
        """The help text, unit included."""
        return f"{self.help} Unit: {self.unit}."


def one(kind: Kind, name: str, unit: str, key: str, text: str) -> Metric:
    """Return a metric of one value, read from ``key`` of the worker's report."""
    return Metric(f"vericache_{name}", kind, unit, text, (("", key),))


def counter(name: str, unit: str, key: str, text: str) -> Metric:
    """Return a counter of ``unit``."""
    return one("counter", f"{name}_total", unit, key, text)


def gauge(name: str, unit: str, key: str, text: str) -> Metric:
    """Return a gauge in ``unit``."""
    return one("gauge", name, unit, key, text)


def histogram(name: str, text: str) -> Metric:
    """Return a histogram of tokens."""
    return Metric(f"vericache_{name}", "histogram", "tokens", text)
