"""The shapes kernels are timed at, and what one timing needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One layer of a model and the requests that are decoded.

    Attributes:
        name: Of the model.
        heads: KV heads.
        group: Query heads of a KV head.
        dim: Of a head.
        tokens: Of a request's full KV.
        kept: Of its draft part.
        rows: Requests that draft at once.
        drafts: Tokens drafted before a verification.
        vocabulary: Tokens the model has.
        segment: Tokens that are coded together.
    """

    name: str
    heads: int = 8
    group: int
    dim: int = 128
    tokens: int = 32768
    kept: int = 8192
    rows: int = 16
    drafts: int = 32
    vocabulary: int
    segment: int = 1024


SHAPES = (
    Shape(name="Llama-3.1-8B", group=4, vocabulary=128256),
    Shape(name="Qwen3-32B", group=8, vocabulary=151936),
)
"""Heads as in each model's published config.json."""

TOY = Shape(
    name="toy",
    heads=2,
    group=2,
    dim=32,
    tokens=128,
    kept=64,
    rows=2,
    drafts=3,
    vocabulary=500,
    segment=32,
)
"""For the interpreter and the references."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One kernel with its data in place.

    Attributes:
        call: Runs it.
        nbytes: Least it must read and write.
    """

    call: Callable[[], object]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel that is timed.

    Attributes:
        name: In words.
        build: Makes its data on a device.
        memory_bound: Whether bytes are what it waits for; the others are only shown.
    """

    name: str
    build: Callable[[Shape, str], Timing]
    memory_bound: bool = True
