"""The kinds of error VeriCache raises; each message names the flag, file or field."""

from __future__ import annotations

from reprlib import Repr


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


class LostKVError(TransferError):
    """A request's KV is not whole any more: it has to be computed again."""


class StoreError(VeriCacheError, RuntimeError):
    """An object of the store is damaged, or not the one that was asked for.

    Args:
        differs: What is wrong, one word: length, checksum, header, tensor; ``name``
            where it is intact, but of another segment or model.
        message: The same for a reader: what was wanted and what there is.
    """

    def __init__(self, differs: str, message: str) -> None:
        super().__init__(f"{differs}: {message}")
        self.differs = differs


QUOTED = 60
"""Characters of a value that a message shows at most."""


def quoted(value: object) -> str:
    """Return ``repr(value)``, cut after ``QUOTED`` characters; never raises.

    Args:
        value: Anything, of any size: a large one is not rendered whole.
    """
    short = Repr()
    short.maxstring = short.maxother = QUOTED
    try:
        text = short.repr(value)
    except Exception as error:  # noqa: BLE001 (5,000 digits, an object of a plug-in)
        text = f"{type(value).__name__} ({type(error).__name__})"
    return text if len(text) <= QUOTED else f"{text[: QUOTED - 3]}..."
