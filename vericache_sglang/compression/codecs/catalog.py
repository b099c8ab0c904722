"""Creates a codec from a line of text with its name and parameters."""

from __future__ import annotations

from vericache_sglang.compression.codecs.base import CODECS, Codec
from vericache_sglang.compression.codecs.kivi import KIVI
from vericache_sglang.compression.codecs.kvquant import KVQuant
from vericache_sglang.compression.codecs.rotatekv import RotateKV
from vericache_sglang.compression.codecs.split_planes import SplitPlanes
from vericache_sglang.compression.codecs.turboquant import TurboQuant
from vericache_sglang.compression.options import fields_of, read_options
from vericache_sglang.errors import ConfigError

OURS: tuple[type[Codec], ...] = (KIVI, KVQuant, RotateKV, SplitPlanes, TurboQuant)


def create_codec(line: str) -> Codec:
    """Build a codec from ``name`` or ``name:parameter=number,parameter=number``.

    Parameters are the codec's fields; omitted ones have their default. The parameter
    ``tables`` is the path of a calibration file, which is read and checked. Example:
    ``split-planes:exponent_bits=3,mantissa_bits=1``.

    Args:
        line: See above.

    Returns:
        The codec, not yet bound.

    Raises:
        ConfigError: A name or parameter is unknown, missing or given twice, or a value
            does not parse; the message lists the known ones.
        CompressionError: The codec refuses the file or a value.
    """
    name, _, options = line.partition(":")
    if name not in CODECS.names():
        raise ConfigError(f"unknown codec {name!r}; known: {', '.join(CODECS.names())}")
    known = fields_of(CODECS[name])
    return CODECS[name](**read_options(f"codec {name!r}", options, known))
