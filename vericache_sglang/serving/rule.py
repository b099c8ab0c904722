"""One row of a refusal table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Rule(NamedTuple):
    """A refused property, with the reason and the remedy for the message.

    Attributes:
        what: The flag, property or package, as the message names it.
        broken: Returns whether the checked object has the property; read-only.
        reason: The consequence, or why it is unknown; ``{0.name}`` is replaced by an
            attribute of the checked object.
        remedy: An imperative; formatted like ``reason``.
    """

    what: str
    broken: Callable[[Any], bool]
    reason: str
    remedy: str
