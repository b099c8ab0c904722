"""Per-request VeriCache options: ``custom_params`` {"vericache": {...}}."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_sglang.config.schema import flag
from vericache_sglang.errors import QUOTED, ConfigError, quoted
from vericache_sglang.observability.request_stats import KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.config.schema import VeriCacheConfig

LENGTHS = ("draft_length", "inner_length")
SWITCHES = {"enabled": True, "report": False, "inner": True}
"""Name of a switch -> its default."""
FIELDS = (*SWITCHES, *LENGTHS)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """One request's options.

    Attributes:
        enabled: Speculate if profitable; False: always decode autoregressively.
        draft_length: Maximum draft length, in tokens.
        report: Also return its statistics in OpenAI's ``usage``.
        inner: Use the server's inner drafter if it has one and its proposals pay.
        inner_length: Most tokens that it proposes per row.
    """

    enabled: bool
    draft_length: int
    report: bool
    inner: bool
    inner_length: int


def read_options(
    custom_params: Mapping[str, Any] | None, config: VeriCacheConfig
) -> RequestOptions:
    """Read and validate a request's options.

    Args:
        custom_params: ``SamplingParams.custom_params``.
        config: The server's; its lengths are the defaults and the maxima.

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
    read: dict[str, Any] = {}
    for name, default in SWITCHES.items():
        read[name] = value = given.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(
                f"{where}.{name} must be true or false, got {quoted(value)}"
            )
    for name in LENGTHS:
        most = getattr(config, name)
        read[name] = value = given.get(name, most)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{where}.{name} must be >= 1, got {quoted(value)}")
        if value > most:
            raise ConfigError(
                f"{where}.{name} must be at most {most}, the server's "
                f"{flag(name)}, got {quoted(value)}"
            )
    return RequestOptions(**read)
