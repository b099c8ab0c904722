"""One row of a refusal table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Rule:
    """Something that must not be so, and what to say where it is.

    Attributes:
        what: The flag or the model property, as the message names it.
        broken: Says of the flags or of the model config whether it is so; reads only.
        reason: What would go wrong, or why nobody can know yet.
        remedy: What to do instead, an imperative.
    """

    what: str
    broken: Callable[[Any], bool]
    reason: str
    remedy: str
