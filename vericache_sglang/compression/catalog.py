"""Finding a compressor by name: ours, then those of installed packages."""

from __future__ import annotations

from importlib.metadata import entry_points

from vericache_sglang.compression.base import SELECTORS, Selector
from vericache_sglang.compression.keynorm import KeyNorm
from vericache_sglang.compression.recency import Recency
from vericache_sglang.compression.snapkv import SnapKV
from vericache_sglang.errors import CompressionError, ConfigError

GROUP = "vericache_sglang.compressors"
"""Entry point group of third-party compressors: name -> factory taking the seed."""

OURS = (KeyNorm, Recency, SnapKV)


def known_names() -> tuple[str, ...]:
    """Return every name that ``create_selector`` accepts, sorted; imports nothing."""
    theirs = {entry.name for entry in entry_points(group=GROUP)}
    return tuple(sorted(theirs.union(SELECTORS.names())))


def create_selector(name: str, seed: int) -> Selector:
    """Build the selector ``--vericache-compressor`` names.

    Args:
        name: Registry or entry point name; ours win.
        seed: ``VeriCacheConfig.seed``.

    Returns:
        A fresh selector, not yet bound.

    Raises:
        ConfigError: Nobody knows the name; the message lists the known ones.
        CompressionError: The entry point did not give a ``Selector``.
    """
    if name in SELECTORS.names():
        return SELECTORS[name](seed)
    for entry in entry_points(group=GROUP):
        if entry.name != name:
            continue
        selector = entry.load()(seed)
        if not isinstance(selector, Selector):
            raise CompressionError(
                f"compressor {name!r} ({entry.value}) is a "
                f"{type(selector).__name__}, not a Selector"
            )
        return selector
    raise ConfigError(
        f"--vericache-compressor: unknown compressor {name!r}; "
        f"known: {', '.join(known_names())}"
    )
