"""The kinds of error VeriCache raises; each message names the flag, file or field."""

from __future__ import annotations

from reprlib import Repr


class VeriCacheError(Exception):
    """Base of every error raised on purpose; catch this to catch them all."""


class ConfigError(VeriCacheError, ValueError):
    """A setting is unknown, of the wrong type or outside its bounds."""


class UnsupportedError(VeriCacheError, RuntimeError):
    """VeriCache does not support the server's flags, model or SGLang version."""


class InvariantError(VeriCacheError, RuntimeError):
    """An internal invariant does not hold: a bug in VeriCache, not a user error."""


class RankError(VeriCacheError, RuntimeError):
    """A tensor-parallel rank failed; every rank raises it, at the same exchange."""


class LostRankError(VeriCacheError, RuntimeError):
    """This rank left a forward that the other ranks may wait in; it cannot go on."""


class CompressionError(VeriCacheError, RuntimeError):
    """A compressor broke its contract: wrong shape, wrong type, not a Selector."""


class TransferError(VeriCacheError, RuntimeError):
    """KV that left the device was not restored bit for bit."""


class LostKVError(TransferError):
    """Some of a request's KV is lost; the request must be prefilled again."""


class MessageError(VeriCacheError, ValueError):
    """A message of a drafter or a verifier is malformed."""


class StoreError(VeriCacheError, RuntimeError):
    """An object of the store is corrupt, or not the requested one.

    Args:
        differs: The faulty field: length, checksum, header or tensor; ``name`` if the
            object is intact but of another segment or model.
        message: Description with the expected and the found value.
    """

    def __init__(self, differs: str, message: str) -> None:
        super().__init__(f"{differs}: {message}")
        self.differs = differs


QUOTED = 60
"""Maximum characters of a value in a message."""


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
