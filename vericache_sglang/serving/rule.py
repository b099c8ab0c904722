"""One row of a refusal table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Rule(NamedTuple):
    """A property that a server may not have, and what to say where it has it.

    Attributes:
        what: The flag, property or package, as the message names it.
        broken: Returns whether what is checked has the property; reads only.
        reason: What would go wrong, or why that is unknown; ``{0.name}`` stands for an
            attribute of what is checked.
        remedy: What to do instead, an imperative; as ``reason``.
    """

    what: str
    broken: Callable[[Any], bool]
    reason: str
    remedy: str
