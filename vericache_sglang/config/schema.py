"""Every setting once: its type, default, unit, bounds and help text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, NamedTuple, get_args, get_type_hints

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Value = str | int | float

STAGING_STEP = 64
"""Staging regions are multiples of this many slots: every page size divides it."""

STAGING_CEILING = 65536
"""Most slots the automatic staging size asks for; a flag may ask for more."""


class Opt(NamedTuple):
    """What the flag, the YAML file and the README table need to know of a field.

    Attributes:
        help: What the setting does, a phrase without a full stop.
        unit: What one unit of the value is; empty for names.
        least: Smallest allowed value, inclusive.
        most: Largest allowed value, inclusive.
        above: Bound the value must exceed; instead of ``least``.
        choices: The allowed names; empty where any name may be.
    """

    help: str
    unit: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()

    def bounds(self) -> str:
        """Spell the allowed values as a condition, "" where there is none."""
        if self.choices:
            return " or ".join(self.choices)
        lower = f"> {self.above:g}" if self.above is not None else ""
        if self.least is not None:
            lower = f">= {self.least:g}"
        upper = f"<= {self.most:g}" if self.most is not None else ""
        return " and ".join(part for part in (lower, upper) if part)

    def allows(self, value: float) -> bool:
        """Say whether ``value`` is inside the bounds; NaN and infinity never are."""
        return (
            abs(value) < 2**63
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VeriCacheConfig:
    """Settings of one server, checked on construction and never changed.

    Integers given for fractional fields become floats, so equal settings compare equal.

    Raises:
        ConfigError: A value has the wrong type or is outside its bounds; the message
            names the field, its flag and the allowed values.
    """

    compressor: Annotated[
        str,
        Opt(
            "what stays of a prompt: SELECTOR, CODEC or SELECTOR+CODEC, options as in "
            "kivi:bits=4; python -m vericache_sglang.compressors lists them"
        ),
    ] = "snapkv"
    keep: Annotated[
        float,
        Opt(
            "part of the prompt each KV head keeps on the device",
            "share of prompt tokens",
            above=0,
            most=1,
        ),
    ] = 0.25
    draft_length: Annotated[
        int, Opt("tokens drafted between two verifications", "tokens", 1, 256)
    ] = 32
    max_verifies: Annotated[
        int, Opt("requests verified in one iteration", "requests", 1, 64)
    ] = 2
    residency: Annotated[
        str,
        Opt(
            "where complements are: auto lets the throughput model choose and steps "
            "aside where plain decoding is faster; host and device are forced",
            choices=("auto", "host", "device"),
        ),
    ] = "auto"
    pacing: Annotated[
        str,
        Opt(
            "when requests are verified: staggered over reserved windows, or the "
            "baselines lockstep and sequential",
            choices=("staggered", "lockstep", "sequential"),
        ),
    ] = "staggered"
    horizon: Annotated[
        int,
        Opt("windows ahead in which reloads are reserved", "iterations", 8, 4096),
    ] = 64
    min_prompt: Annotated[
        int, Opt("shorter prompts are decoded plainly, on the full KV", "tokens", 1)
    ] = 2048
    sink_tokens: Annotated[
        int, Opt("first prompt tokens that are always kept", "tokens", 0)
    ] = 4
    recent_tokens: Annotated[
        int, Opt("last prompt tokens that are always kept", "tokens", 0)
    ] = 32
    staging_tokens: Annotated[
        int,
        Opt(
            "size of the staging region; 0 sizes it from the context length at boot",
            "KV slots",
            0,
        ),
    ] = 0
    host_gb: Annotated[
        float,
        Opt(
            "host memory of a rank for what leaves the device; 0 shares out a quarter "
            "of what is free at boot",
            "GiB",
            0,
        ),
    ] = 0.0
    link_gbps: Annotated[
        float,
        Opt("emulated host link; 0 copies as fast as the machine does", "GB/s", 0),
    ] = 0.0
    seed: Annotated[
        int, Opt("seed of compressors that draw random numbers", "number", 0)
    ] = 0
    acceptance: Annotated[
        str,
        Opt(
            "how drafts of sampled requests are verified: coupled draws both sides "
            "with the same noise, rejection is the classic rule; seeded requests are "
            "always coupled",
            choices=("coupled", "rejection"),
        ),
    ] = "coupled"
    shadow_rate: Annotated[
        float,
        Opt(
            "finished greedy requests decoded again plainly, while idle, and compared",
            "share of requests",
            0,
            1,
        ),
    ] = 0.0
    trace: Annotated[
        str,
        Opt("file for a Perfetto trace of every iteration; off writes none", "path"),
    ] = "off"

    def __post_init__(self) -> None:
        for name in options():
            value = check(name, getattr(self, name))
            object.__setattr__(self, name, value)


@cache
def options() -> Mapping[str, Opt]:
    """Return the ``Opt`` of every field, in declaration order."""
    hints = get_type_hints(VeriCacheConfig, include_extras=True)
    return {name: get_args(hints[name])[1] for name in _names()}


@cache
def kinds() -> Mapping[str, type[Value]]:
    """Return the type of every field, in declaration order."""
    hints = get_type_hints(VeriCacheConfig)
    return {name: hints[name] for name in _names()}


def _names() -> list[str]:
    return [field.name for field in fields(VeriCacheConfig)]


def defaults() -> dict[str, Value]:
    """Return every field with its default, in declaration order."""
    return asdict(VeriCacheConfig())


def flag(name: str) -> str:
    """Spell a field name as its command-line flag."""
    return f"--vericache-{name.replace('_', '-')}"


def check(name: str, value: object) -> Value:
    """Return ``value`` as the type of field ``name``.

    Raises:
        ConfigError: ``value`` has another type or is outside the field's bounds.
    """
    kind = kinds()[name]
    if kind is str:
        choices = options()[name].choices
        given = value.strip() if isinstance(value, str) else ""
        if given and (not choices or given in choices):
            return given
    elif (
        # bool is an int to Python, but `draft_length: yes` is a mistake to us.
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (kind is float or isinstance(value, int))
        and options()[name].allows(value)
    ):
        return kind(value)
    opt = options()[name]
    wanted = " ".join(filter(None, (_KIND_WORDS[kind], opt.bounds(), opt.unit)))
    raise ConfigError(
        f"{name} ({flag(name)}) must be {wanted}, got {value!r}; "
        f"the default is {defaults()[name]!r}"
    )


_KIND_WORDS: Mapping[type, str] = {
    str: "a name",
    int: "a whole number",
    float: "a number",
}


def parse(name: str, text: str) -> Value:
    """Read the text of a flag as the type of field ``name``.

    Raises:
        ConfigError: ``text`` is no such value, or outside the field's bounds.
    """
    kind = kinds()[name]
    try:
        value: object = kind(text)
    except ValueError:
        value = text  # check() then says what was wanted
    return check(name, value)


def resolve_host(config: VeriCacheConfig, free_bytes: int, ranks: int) -> float:
    """Return ``host_gb`` in GiB, in whole MiB where it follows from the machine.

    Args:
        config: Its ``host_gb`` wins; 0 asks for a rank's part of a quarter.
        free_bytes: Memory of the machine that is free.
        ranks: Ranks on it, >= 1.
    """
    if config.host_gb:
        return config.host_gb
    return max(1, free_bytes // (4 * ranks) >> 20) / 1024


def boot_line(config: VeriCacheConfig) -> str:
    """Return the one line a server prints at start: every effective setting.

    The format is frozen: ``VeriCache: field=value ...`` in declaration order.
    """
    pairs = (f"{name}={value}" for name, value in asdict(config).items())
    return f"VeriCache: {' '.join(pairs)}"


def resolve_staging(
    config: VeriCacheConfig, context_length: int, exact: float | None = None
) -> int:
    """Return the size of the staging region, in KV slots.

    Args:
        config: Its ``staging_tokens`` wins; 0 asks for ``max_verifies`` complements of
            the longest context, at most ``STAGING_CEILING``. A context whose single
            complement exceeds the ceiling needs ``staging_tokens`` set by hand, or its
            requests are decoded on the full KV.
        context_length: Longest context the server accepts, in tokens, >= 1.
        exact: Share of a prompt that stays exact on the device; None: ``keep``.

    Returns:
        A multiple of ``STAGING_STEP``; 0 only when nothing ever leaves the device.

    Raises:
        ConfigError: ``context_length`` is below 1.
    """
    if context_length < 1:
        raise ConfigError(f"context length must be >= 1 token, got {context_length}")
    wanted = config.staging_tokens
    if not wanted:
        share = config.keep if exact is None else exact
        complement = context_length - int(share * context_length)
        wanted = min(config.max_verifies * complement, STAGING_CEILING)
    return -(-wanted // STAGING_STEP) * STAGING_STEP
