"""What throughput is measured at: models, cards and loads; and what is simulated.

Weights are random there, so acceptance is simulated and everything written says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu.budgets import Card

DRAFTS = 30
ACCEPTANCE = 0.972
"""20 of 30 drafts accepted: what the paper reports (arXiv:2605.17613)."""

KEEP = 0.25
HOST_GIB = 48

SYSTEMS = ("plain", "VeriCache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model on a card, and the loads it is measured with.

    Attributes:
        name: In words.
        model: Of ``gpu.models``; "" is the demo model.
        card: Its memory.
        points: (tokens of a prompt, requests at once, tokens of an answer).
        least: Ratio wanted at every point.
    """

    name: str
    model: str
    card: Card
    points: tuple[tuple[int, int, int], ...]
    least: float = 1.0


SETUPS = (
    Setup(
        name="Qwen3-32B, 80 GB card",
        model="qwen3-32b",
        card=Card(name="80 GB card", gib=79.6, reserve_gib=3.0),
        points=((32000, 6, 512),),
        least=2.5,
    ),
    Setup(
        name="Llama-3.1-8B, 48 GB card",
        model="llama-3.1-8b",
        card=Card(name="48 GB card", gib=47.5, reserve_gib=3.0),
        points=((32000, 12, 384), (8000, 16, 256)),
    ),
    Setup(
        name="Llama-3.1-8B, whole card",
        model="llama-3.1-8b",
        card=Card(name="whole card"),
        points=((32000, 12, 384), (8000, 32, 256)),
    ),
    Setup(
        name="Qwen3-32B, whole card",
        model="qwen3-32b",
        card=Card(name="whole card"),
        points=((32000, 8, 384), (8000, 16, 256)),
    ),
)
"""The small grid; the first row is the paper's case."""

TOY = Setup(
    name="demo model",
    model="",
    card=Card(name="4,096 slots"),
    points=((600, 4, 24),),
    least=0.0,
)
TOY_SLOTS = 4096


def label(acceptance: float) -> str:
    """Return what every output begins with; see ``evaluation.options.LABEL``."""
    return (
        f"SIMULATED ACCEPTANCE: each draft is accepted with p = {acceptance:g}, "
        "whatever the model says. Times are measured, acceptance "
        "and tokens are not"
    )
