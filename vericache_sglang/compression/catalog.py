"""Creates compressors from a line of text: built-in ones, then installed packages'."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vericache_sglang.compression.base import SELECTORS, Selector
from vericache_sglang.compression.codecs import catalog as codec_catalog
from vericache_sglang.compression.codecs.base import Codec
from vericache_sglang.compression.compressor import Compressor
from vericache_sglang.compression.expected_attention import ExpectedAttention
from vericache_sglang.compression.keynorm import KeyNorm
from vericache_sglang.compression.kvzap import KVzap
from vericache_sglang.compression.kvzip import KVzip
from vericache_sglang.compression.observed import Observed
from vericache_sglang.compression.options import (
    Option,
    arguments_of,
    fields_of,
    read_options,
    spell,
)
from vericache_sglang.compression.random_tokens import RandomTokens
from vericache_sglang.compression.recency import Recency
from vericache_sglang.compression.snapkv import SnapKV
from vericache_sglang.errors import CompressionError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.metadata import EntryPoint

GROUP = "vericache_sglang.compressors"
"""Entry point group of third-party compressors; see ``create_compressor``."""

FLAG = "--vericache-compressor"

OURS: tuple[type[Selector], ...] = (
    *(ExpectedAttention, KeyNorm, KVzap, KVzip, Observed, RandomTokens, Recency),
    SnapKV,
)
"""Classes of the built-in selectors, registered in ``SELECTORS``."""

CODECS = {codec.name: codec for codec in codec_catalog.OURS}
"""Classes of the built-in codecs by name."""


@dataclass(frozen=True, slots=True)
class Method:
    """One compression method of the catalog.

    Attributes:
        name: Its name in a line.
        factory: Called with the seed and options.
        options: Known options by name.
        others: Whether it takes other options too, as texts.
        version: Version of the method, or of its package.
        origin: Package of a third-party method; "" for a built-in one.
    """

    name: str
    factory: Callable[..., object]
    options: dict[str, Option]
    others: bool = False
    version: str = "1"
    origin: str = ""


def known_names() -> tuple[str, ...]:
    """Return every name a line may have, sorted: selectors, codecs, third parties."""
    theirs = {entry.name for entry in entry_points(group=GROUP)}
    return tuple(sorted(theirs.union(SELECTORS.names(), CODECS)))


def find_method(name: str) -> Method:
    """Look up a name; built-in names win, third-party code is loaded only now.

    Raises:
        ConfigError: The name is unknown; the message lists the known ones.
    """
    if name in SELECTORS:
        factory = SELECTORS[name]
        version = str(getattr(factory, "version", 1))
        return Method(name, factory, *arguments_of(factory), version=version)
    if name in CODECS:
        return _codec(name, CODECS[name])
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            return _third_party(entry)
    raise ConfigError(
        f"{FLAG}: unknown compressor {name!r}; known: {', '.join(known_names())}"
    )


def create_compressor(line: str, seed: int) -> Compressor:
    """Build what ``--vericache-compressor`` says.

    A line is ``SELECTOR``, ``CODEC`` or ``SELECTOR+CODEC``, each a name with options:
    ``name:key=value,key=value``. Values are read as the type of the option's default,
    ``true`` and ``false`` for switches; they hold no comma, and no plus before a
    letter. Examples: ``snapkv:pooling=7``, ``split-planes:exponent_bits=3``,
    ``kvzip:chunk=4096+kivi:bits=4``.

    An entry point of the group ``vericache_sglang.compressors`` is called with the seed
    and the options, and returns a ``Selector``, a ``Codec`` or a ``Compressor``; a
    codec class is called with the options alone.

    Args:
        line: See above.
        seed: ``VeriCacheConfig.seed``, for selectors and third parties.

    Returns:
        A fresh compressor, not yet bound.

    Raises:
        ConfigError: A name or option is unknown, or a value is refused; the message
            names the flag, the part of the line and the known names.
        CompressionError: An entry point returned another type, or the parts are
            incompatible.
    """
    texts = [text.strip() for text in re.split(r"\+(?=\s*[A-Za-z])", line)]
    parts = [_part(text, seed) for text in texts]
    if len(parts) == 1:
        return replace(parts[0], line=line)
    dropping, packing = parts[0], parts[-1]
    if (
        len(parts) > 2
        or dropping.selector is None
        or dropping.codec is not None
        or packing.selector is not None
    ):
        raise ConfigError(
            f"{FLAG}: {line!r} must be a selector, a codec, or SELECTOR+CODEC; "
            f"selectors: {', '.join(SELECTORS.names())}; "
            f"codecs: {', '.join(CODECS)}"
        )
    return replace(dropping, line=line, codec=packing.codec)


def _codec(name: str, factory: type[Codec]) -> Method:
    def made(seed: int, /, **options: Any) -> Codec:
        return factory(**options)  # a codec draws nothing that its fields do not say

    return Method(name, made, fields_of(factory))


def _third_party(entry: EntryPoint) -> Method:
    """Load the entry point of an installed package.

    Raises:
        ConfigError: It cannot be imported; the message names the entry point.
    """
    where = f"compressor {entry.name!r} of the entry point {entry.value}"
    try:
        factory = entry.load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where} cannot be imported: {error!r}") from error
    if isinstance(factory, type) and issubclass(factory, Codec):
        return replace(_codec(entry.name, factory), origin=entry.value)
    return Method(
        entry.name,
        factory,
        *arguments_of(factory),
        version=entry.dist.version if entry.dist else "unknown",
        origin=entry.value,
    )


def _part(text: str, seed: int) -> Compressor:
    """Build one part of a line.

    Raises:
        ConfigError: See ``create_compressor``.
        CompressionError: An entry point returned another type.
    """
    name, _, given = text.partition(":")
    method = find_method(name.strip())
    kind = "codec" if method.name in CODECS else "compressor"
    try:
        known, others = method.options, method.others
        options = read_options(f"{kind} {method.name!r}", given, known, others=others)
        made = method.factory(seed, **options)
    except (ConfigError, CompressionError) as error:
        raise ConfigError(f"{FLAG}: {text!r}: {error}") from error
    except (Exception, SystemExit) as error:
        if not method.origin:
            raise
        raise ConfigError(f"{FLAG}: {text!r} ({method.origin}): {error!r}") from error
    if isinstance(made, Compressor):
        return made
    if isinstance(made, Codec):
        return Compressor(line=text, codec=made)
    if isinstance(made, Selector):
        return Compressor(
            line=text,
            selector=made,
            selector_identity=_identity(method, options, seed),
        )
    raise CompressionError(
        f"compressor {method.name!r} ({method.origin}) is a {type(made).__name__}, "
        "not a Selector, a Codec or a Compressor"
    )


def _identity(method: Method, given: dict[str, Any], seed: int) -> str:
    """Return a selector's identity in the form of ``Codec.identity``, all options."""
    values = {name: option.default for name, option in method.options.items()} | given
    said = [f"{name}={spell(value)}" for name, value in values.items()]
    return f"{method.name}@{method.version}({','.join([*said, f'seed={seed}'])})"
