"""Per-request VeriCache options: ``custom_params`` {"vericache": {...}}."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.errors import QUOTED, ConfigError, quoted
from vericache_sglang.observability.request_stats import KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELDS = ("enabled", "draft_length", "report", "inner")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """One request's options.

    Attributes:
        enabled: Speculate if profitable; False: always decode autoregressively.
        draft_length: Maximum draft length, in tokens.
        report: Also return its statistics in OpenAI's ``usage``.
        inner: Use the server's inner drafter if it has one and its proposals pay.
    """

    enabled: bool
    draft_length: int
    report: bool
    inner: bool = True


def read_options(custom_params: Mapping[str, Any] | None, most: int) -> RequestOptions:
    """Read and validate a request's options.

    Args:
        custom_params: ``SamplingParams.custom_params``.
        most: The server's draft length: the default and the maximum.

    Raises:
        ConfigError: A field or its value is invalid; the message names it.
    """
    if custom_params is not None and not isinstance(custom_params, dict):
        raise ConfigError(
            f"custom_params must be an object, got {quoted(custom_params)}"
        )
    given = (custom_params or {}).get(KEY, {})
    where = f"custom_params.{KEY}"
    if not isinstance(given, dict):
        raise ConfigError(f"{where} must be an object with {', '.join(FIELDS)}")
    unknown = [str(name) for name in given if name not in FIELDS]
    if unknown:
        raise ConfigError(
            f"{where}.{unknown[0][:QUOTED]} is not known; it has {', '.join(FIELDS)}"
        )
    switches = {"enabled": True, "report": False, "inner": True}
    for name, default in switches.items():
        switches[name] = value = given.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(
                f"{where}.{name} must be true or false, got {quoted(value)}"
            )
    length = given.get("draft_length", most)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ConfigError(f"{where}.draft_length must be >= 1, got {quoted(length)}")
    if length > most:
        raise ConfigError(
            f"{where}.draft_length must be at most {most}, the server's "
            f"--vericache-draft-length, got {quoted(length)}"
        )
    return RequestOptions(**switches, draft_length=length)
