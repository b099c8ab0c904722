"""The kinds of error VeriCache raises; each message names the flag, file or field."""

from __future__ import annotations


class VeriCacheError(Exception):
    """Base of every error raised on purpose; catch this to catch them all."""


class ConfigError(VeriCacheError, ValueError):
    """A setting is unknown, of the wrong type or outside its bounds."""


class UnsupportedError(VeriCacheError, RuntimeError):
    """The server, model or SGLang version is one VeriCache refuses to run with."""


class InvariantError(VeriCacheError, RuntimeError):
    """Our own accounting does not add up: a bug here, never a mistake of the user."""


class CompressionError(VeriCacheError, RuntimeError):
    """A compressor broke its contract: wrong shape, wrong type, not a Selector."""


class TransferError(VeriCacheError, RuntimeError):
    """KV that left the device did not come back as it went."""


class StoreError(VeriCacheError, RuntimeError):
    """An object of the store is damaged, or not the one that was asked for.

    Args:
        differs: What is wrong, one word: length, magic, version, checksum, header,
            tensor, fingerprint, name, part, pair, compressor.
        message: The same for a reader: what was wanted and what there is.
    """

    def __init__(self, differs: str, message: str) -> None:
        super().__init__(f"{differs}: {message}")
        self.differs = differs
