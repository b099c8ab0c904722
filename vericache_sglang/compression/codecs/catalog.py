"""Finding a codec by a line of text: its name and its parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

from vericache_sglang.compression.codecs.base import CODECS, Codec
from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.compression.codecs.kvquant import KVQuant
from vericache_sglang.compression.codecs.rotatekv import RotateKV
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.compression.codecs.turboquant import TurboQuant
from vericache_sglang.errors import ConfigError

OURS: tuple[type[Codec], ...] = (KIVI, KVQuant, RotateKV, SplitPlanes, TurboQuant)

SWITCH = {"true": True, "false": False}


def create_codec(line: str) -> Codec:
    """Build a codec from ``name`` or ``name:parameter=number,parameter=number``.

    Parameters are the codec's fields; what is not given has its default. The parameter
    ``tables`` is the path of a calibration file, which is read and checked. Example:
    ``split-planes:exponent_bits=3,mantissa_bits=1``.

    Args:
        line: See above.

    Returns:
        The codec, not yet bound.

    Raises:
        ConfigError: Unknown name or parameter, one that is missing or given twice, or
            a value that is none; the message lists what is known.
        CompressionError: The file or a value is refused by the codec.
    """
    name, _, options = line.partition(":")
    if name not in CODECS.names():
        raise ConfigError(f"unknown codec {name!r}; known: {', '.join(CODECS.names())}")
    fields = {
        field.name: field
        for field in dataclasses.fields(CODECS[name])  # type: ignore[arg-type]
        if field.metadata.get("identity", True)
    }
    given: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, _, text = option.partition("=")
        if key not in fields or key in given:
            raise ConfigError(
                f"codec {name!r}: unknown or repeated parameter {key!r}; "
                f"known: {', '.join(fields)}"
            )
        given[key] = _value(f"codec {name!r}: {key}", fields[key], text)
    for key, field in fields.items():
        if key not in given and field.default is dataclasses.MISSING:
            raise ConfigError(f"codec {name!r}: parameter {key!r} is missing")
    return CODECS[name](**given)


def _value(what: str, field: dataclasses.Field[Any], text: str) -> Any:
    """Read one parameter as the type of its default.

    Raises:
        ConfigError: It cannot be read so.
        CompressionError: See ``create_codec``.
    """
    if "read" in field.metadata:
        return field.metadata["read"](text)
    try:
        if isinstance(field.default, bool):
            return SWITCH[text]
        return int(text) if isinstance(field.default, int) else float(text)
    except (KeyError, ValueError) as error:
        kind = type(field.default).__name__
        raise ConfigError(f"{what} must be of type {kind}, got {text!r}") from error
