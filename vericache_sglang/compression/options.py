"""Options of compression methods: factory signatures and ``key=value`` parsing."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SWITCH = {"true": True, "false": False}

REQUIRED = inspect.Parameter.empty
"""Default of a required option."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a method.

    Attributes:
        name: Name in a line.
        default: Default value; ``REQUIRED``: the line must give one.
        read: Parses the value if the type of ``default`` does not determine it.
    """

    name: str
    default: Any
    read: Callable[[str], Any] | None = None

    def value(self, text: str) -> Any:
        """Read a text as the type of the default; any text where that is no number.

        Raises:
            ValueError: The text is no such value.
            CompressionError: ``read`` refuses a file.
        """
        if self.read is not None:
            return self.read(text)
        if isinstance(self.default, bool):
            if text not in SWITCH:
                raise ValueError(text)
            return SWITCH[text]
        if isinstance(self.default, (int, float)):
            return type(self.default)(text)
        return text

    def spelled(self) -> str:
        """Return ``name=default`` in the syntax of a line."""
        if self.default is REQUIRED:
            return f"{self.name}=(required)"
        return f"{self.name}={spell(self.default)}"


def spell(value: object) -> str:
    """Format a value in the syntax of a line; control characters are escaped."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).encode("unicode_escape").decode()


def fields_of(codec: Callable[..., Any]) -> dict[str, Option]:
    """Return the options of a codec class by name: its fields, in order."""
    known = [
        Option(
            field.name,
            REQUIRED if field.default is dataclasses.MISSING else field.default,
            field.metadata.get("read"),
        )
        for field in dataclasses.fields(codec)  # type: ignore[arg-type]
        if field.metadata.get("identity", True)
    ]
    return {option.name: option for option in known}


def arguments_of(factory: Callable[..., Any]) -> tuple[dict[str, Option], bool]:
    """Return a factory's options: its parameters after the first, the seed.

    Returns:
        Options by name, in order, and whether it takes others too (``**options``).
    """
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except ValueError:  # written in C, without a signature
        return {}, False
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [
        Option(parameter.name, parameter.default)
        for parameter in parameters[1:]
        if parameter.kind in named
    ]
    others = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    return {option.name: option for option in known}, others


def read_options(
    what: str, text: str, known: Mapping[str, Option], *, others: bool = False
) -> dict[str, Any]:
    """Read ``key=value,key=value``.

    Args:
        what: Owner of the options, for messages: ``codec 'kivi'``.
        text: See above; "": no options. Values must not contain a comma.
        known: Known options by name.
        others: Accept unknown options other than ``seed``, as texts.

    Returns:
        The given values by option name.

    Raises:
        ConfigError: An option is unknown, given twice or missing, or its value cannot
            be read; the message lists what is known.
        CompressionError: A file that an option names is refused.
    """
    given: dict[str, Any] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        key, _, value = (word.strip() for word in item.partition("="))
        # A factory that takes any option still gets the seed of the server.
        if key in given or not (key in known or (others and key != "seed")):
            raise ConfigError(
                f"{what}: unknown or repeated parameter {key!r}; "
                f"known: {', '.join(known) or 'none'}"
            )
        option = known.get(key, Option(key, ""))
        try:
            given[key] = option.value(value)
        except ValueError as error:
            kind = type(option.default).__name__
            raise ConfigError(
                f"{what}: {key} must be of type {kind}, got {value!r}; "
                f"the default is {spell(option.default)}"
            ) from error
    for option in known.values():
        if option.default is REQUIRED and option.name not in given:
            raise ConfigError(
                f"{what}: parameter {option.name!r} is missing; "
                f"known: {', '.join(known)}"
            )
    return given
