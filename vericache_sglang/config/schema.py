"""Every setting once: its type, default, unit, bounds and help text."""

from __future__ import annotations

import difflib
import logging
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vericache_sglang.errors import ConfigError
from vericache_sglang.former_names import FORMER_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic.fields import FieldInfo

logger = logging.getLogger(__name__)

Value = str | int | float

STAGING_STEP = 64
"""Staging buffers are multiples of this many slots: every page size divides it."""

STAGING_CEILING = 65536
"""Maximum slots of the automatic staging size; a flag may ask for more."""

STAGING_SHARE = 4
"""The automatic staging size is at most the pool's slots divided by this."""

RENAMED = FORMER_NAMES["setting"]
"""Former name -> present one; flags and YAML take both."""


def _setting(default: Value, text: str, unit: str = "", **bounds: float) -> Any:
    """Declare a field; ``bounds`` are pydantic's ``gt``, ``ge`` and ``le``."""
    # Larger numbers could overflow later; the bound is not part of the messages.
    limits: dict[str, Any] = {"lt": 2**63} if not isinstance(default, str) else {}
    limits |= bounds or ({"min_length": 1} if isinstance(default, str) else {})
    extra: dict[str, Any] = {"unit": unit}
    return Field(default, description=text, json_schema_extra=extra, **limits)


class VeriCacheConfig(BaseModel):
    """Settings of one server, checked on construction and never changed.

    Raises:
        ConfigError: A value has the wrong type or is outside its bounds, or a field is
            unknown; the message names field, flag, allowed values and default.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        str_strip_whitespace=True,
    )

    compressor: str = _setting(
        "snapkv",
        "compression method: SELECTOR, CODEC or SELECTOR+CODEC, with options as in "
        "kivi:bits=4; python -m vericache_sglang.compressors lists them",
    )
    keep: float = _setting(
        0.25,
        "part of the prompt tokens that every KV head keeps in the draft KV",
        "share of prompt tokens",
        gt=0,
        le=1,
    )
    # 31 drafts and the token before them are 32 queries. With 4 query heads per KV head
    # they fill a tile of 128 rows in FlashAttention 3; one more would take two tiles.
    draft_length: int = _setting(
        31, "longest draft between two verifications", "tokens", ge=1, le=256
    )
    max_verifies: int = _setting(
        2, "requests verified in one scheduler iteration", "requests", ge=1, le=64
    )
    residency: Literal["auto", "host", "device"] = _setting(
        "auto",
        "where the residual KV is: auto lets the throughput model choose, and disables "
        "speculation where autoregressive decoding is faster, and under "
        "--enable-deterministic-inference never the host, from where KV comes back in "
        "another order, which rounds otherwise; host and device are forced",
    )
    pacing: Literal["staggered", "lockstep", "sequential"] = _setting(
        "staggered",
        "when requests are verified: staggered over reserved iterations, or the "
        "baselines lockstep and sequential",
    )
    horizon: int = _setting(
        64,
        "iterations ahead for which prefetches of residual KV are reserved",
        "iterations",
        ge=8,
        le=4096,
    )
    min_prompt: int = _setting(
        2048,
        "shorter prompts are decoded autoregressively, on the full KV",
        "tokens",
        ge=1,
    )
    sink_tokens: int = _setting(
        4, "first prompt tokens that are always kept", "tokens", ge=0
    )
    recent_tokens: int = _setting(
        32, "last prompt tokens that are always kept", "tokens", ge=0
    )
    staging_tokens: int = _setting(
        0,
        "size of the staging buffer, which residual KV is prefetched into; 0 sizes it "
        "from the context length at boot",
        "KV slots",
        ge=0,
    )
    host_gb: float = _setting(
        0.0,
        "host memory of a rank for offloaded, swapped-out and cached KV; 0 shares out "
        "a quarter of what is free at boot",
        "GiB",
        ge=0,
    )
    link_gbps: float = _setting(
        0.0,
        "bandwidth of an emulated host link; 0 copies as fast as the machine does",
        "GB/s",
        ge=0,
    )
    store_key: str = _setting(
        "off",
        "file of a key that seals stored segments, so that only its holders can change "
        "answers; off trusts whoever can write to the store",
        "path",
    )
    store_shared_folder: Literal["off", "on"] = _setting(
        "off", "whether the store's folder may be one that other users can write to"
    )
    draft_first: Literal["off", "on"] = _setting(
        "off",
        "whether requests begin to draft on the draft KV of a stored prefix while its "
        "residual KV is still being read; for stores behind a slow link",
    )
    seed: int = _setting(
        0, "seed of compressors that draw random numbers", "number", ge=0
    )
    acceptance: Literal["coupled", "rejection"] = _setting(
        "coupled",
        "how drafts of sampled requests are verified: coupled draws draft and target "
        "with the same noise, rejection is rejection sampling; seeded requests are "
        "always coupled",
    )
    inner: Literal["none", "ngram", "model", "eagle3", "mtp"] = _setting(
        "none",
        "inner drafter, which proposes further tokens of a row: ngram continues what "
        "the end of the text has followed before, in the request or in finished "
        "outputs; model is the small model that --speculative-draft-model-path names, "
        "eagle3 the EAGLE3 head that it names; mtp is the served model's own head",
    )
    inner_length: int = _setting(
        4, "most tokens that the inner drafter proposes per row", "tokens", ge=1, le=16
    )
    inner_corpus: int = _setting(
        65536,
        "last tokens of finished outputs that ngram searches; 0 searches each "
        "request's own text only, as is always done for requests with an extra_key",
        "tokens",
        ge=0,
        le=1 << 20,
    )
    inner_window: int = _setting(
        512,
        "tokens of a text that model reads, the first 4 and the last ones, or eagle3 "
        "and mtp, the last ones",
        "tokens",
        ge=64,
        le=1 << 16,
    )
    consistency_check_rate: float = _setting(
        0.0,
        "part of the finished greedy requests that is replayed without speculation "
        "while the server is idle, and compared",
        "share of requests",
        ge=0,
        le=1,
    )
    trace: str = _setting(
        "off", "file for a Perfetto trace of every iteration; off writes none", "path"
    )
    trace_mb: int = _setting(
        1024,
        "size at which the trace is renamed to FILE.1, in place of an earlier one, and "
        "begun again; 0 lets it grow",
        "MiB",
        ge=0,
    )
    live_page: Literal["on", "off"] = _setting(
        "on", "whether GET /vericache, /vericache/state and /vericache/cache are served"
    )

    role: Literal["standalone", "drafter", "verifier"] = _setting(
        "standalone",
        "what the server does with others: a verifier computes requests that drafters "
        "own, standalone serves alone",
    )
    peer_bind: str = _setting(
        "off", "address on which a verifier serves drafters, tcp://HOST:PORT", "address"
    )
    verifiers: str = _setting(
        "off", "addresses of a drafter's verifiers, with commas between", "addresses"
    )
    peer_key: str = _setting(
        "off",
        "file of the key that drafters and verifiers share; off serves on loopback "
        "addresses only, without encryption",
        "path",
    )
    lease_s: float = _setting(
        10.0,
        "silence of a drafter after which a verifier ends its requests, and of a "
        "verifier after which a drafter moves a request",
        "seconds",
        ge=1,
        le=3600,
    )
    max_guests: int = _setting(
        256,
        "requests of drafters that a verifier computes at once",
        "requests",
        ge=1,
        le=4096,
    )
    guest_kv: Literal["auto", "cached", "stateless"] = _setting(
        "auto",
        "full KV of a verifier's guests between verdicts: cached on the device; "
        "stateless left to the prefix cache, and prefilled from there; auto cached "
        "until other requests wait for memory",
    )
    remote_path: Literal["auto", "b1", "p1", "p2", "local"] = _setting(
        "b1",
        "where a drafter has requests decoded: b1 at a verifier if one takes them; p1 "
        "too, and once their draft KV has been read from the store they draft here and "
        "are verified there; p2 too, until their residual KV has been read as well and "
        "they are verified here; local always here; auto chosen for each request by "
        "what these were measured to take",
    )

    @property
    def verifier_addresses(self) -> tuple[str, ...]:
        """Addresses of the verifiers; none if ``verifiers`` is off."""
        given = "" if self.verifiers == "off" else self.verifiers
        return tuple(filter(None, (each.strip() for each in given.split(","))))

    @property
    def proposals(self) -> int:
        """Most tokens that an inner drafter proposes per row; 0 without one."""
        return 0 if self.inner == "none" else self.inner_length

    @property
    def inner_weights(self) -> bool:
        """Whether the inner drafter has weights: a small model's or a head's."""
        return self.inner == "model" or self.inner_head

    @property
    def drafts_for_verifiers(self) -> bool:
        """Whether a drafter's requests draft here and are verified there (P1, P2)."""
        return self.role == "drafter" and self.remote_path in ("auto", "p1", "p2")

    @property
    def decodes_locally(self) -> bool:
        """Whether a drafter decodes all requests itself, on stored full KV (B2)."""
        return self.role == "drafter" and self.remote_path == "local"

    @property
    def inner_head(self) -> bool:
        """Whether the inner drafter reads what the served model computed."""
        return self.inner in ("eagle3", "mtp")

    @property
    def most_drafts(self) -> int:
        """Most drafts of one verification: the last draft row may have proposals."""
        return self.draft_length + self.proposals

    @property
    def ring_spare(self) -> int:
        """Slots of a small model's ring beyond its window.

        A rejected draft, and what was proposed behind it, lie past the end of the text.
        """
        return self.most_drafts + self.proposals + 2

    @property
    def ring_slots(self) -> int:
        """KV slots in which a small model holds one request."""
        return self.inner_window + self.ring_spare

    @property
    def ring_reach(self) -> int:
        """Most places from the begin of a window to the last one that is written.

        Two forwards may not have been reported, each of which adds at most
        ``ring_spare``, and a window is begun anew as late as that again.
        """
        return self.inner_window + 4 * self.ring_spare

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**_present_names(values))
        except ValidationError as error:
            reasons = (_reason(each) for each in error.errors())
            raise ConfigError("; ".join(reasons)) from error


def _present_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with former field names replaced by present ones."""
    given = dict(values)
    for old, new in RENAMED.items():
        if old not in given:
            continue
        if new in given:
            raise ConfigError(f"{old} is the former name of {new}; give one of them")
        logger.warning("VeriCache: %s is now called %s", flag(old), flag(new))
        given[new] = given.pop(old)
    return given


def _reason(error: Mapping[str, Any]) -> str:
    """Format a pydantic error: the expected and the given value."""
    name, given = str(error["loc"][0]), error["input"]
    if error["type"] == "extra_forbidden":
        return f"unknown field {name!r}; {nearest(name, fields())}"
    field = fields()[name]
    wanted = " ".join(filter(None, (_KIND_WORDS[field.kind], field.bounds, field.unit)))
    shown = "nothing" if given is None else repr(given)
    return (
        f"{name} ({flag(name)}) must be {wanted}, got {shown}; the default is "
        f"{field.default!r}"
    )


_KIND_WORDS: Mapping[type, str] = {
    str: "a name",
    int: "a whole number",
    float: "a number",
}


def nearest(name: str, known: Mapping[str, object]) -> str:
    """Return the hint for an unknown name: the nearest known one, else all of them."""
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


class SettingField(NamedTuple):
    """Description of a field for flags, YAML comments, errors and the settings page.

    Attributes:
        default: Default value.
        kind: Type of its values: ``str``, ``int`` or ``float``.
        unit: Unit of the value; empty for names.
        bounds: The allowed values as a condition; empty if unbounded.
        help: The setting's effect, a phrase without a full stop.
    """

    default: Value
    kind: type[Value]
    unit: str
    bounds: str
    help: str


@cache
def fields() -> Mapping[str, SettingField]:
    """Return every field, in declaration order."""
    return {
        name: SettingField(
            info.default,
            type(info.default),
            info.json_schema_extra["unit"],  # type: ignore[index, arg-type]
            _bounds(info),
            info.description or "",
        )
        for name, info in VeriCacheConfig.model_fields.items()
    }


def _bounds(info: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(each, name):g}"
        for each in info.metadata
        for name, sign in (("gt", ">"), ("ge", ">="), ("le", "<="))
        if hasattr(each, name)
    ]
    return " or ".join(get_args(info.annotation)) or " and ".join(limits)


def flag(name: str) -> str:
    """Return the command-line flag of a field."""
    return f"--vericache-{name.replace('_', '-')}"


def boot_line(config: VeriCacheConfig) -> str:
    """Return the one line a server prints at start: every effective setting.

    The format is frozen: ``VeriCache: field=value ...`` in declaration order.
    """
    pairs = (f"{name}={value}" for name, value in config.model_dump().items())
    return f"VeriCache: {' '.join(pairs)}"


def resolve_host(config: VeriCacheConfig, free_bytes: int, ranks: int) -> float:
    """Return ``host_gb`` in GiB, in whole MiB where it follows from the machine.

    Args:
        config: Its ``host_gb`` wins; 0 asks for a rank's share of a quarter of
            ``free_bytes``.
        free_bytes: Free memory of the machine, or of its container, in bytes.
        ranks: Ranks on the machine, >= 1.
    """
    if config.host_gb:
        return config.host_gb
    return max(1, free_bytes // (4 * ranks) >> 20) / 1024


def resolve_staging(
    config: VeriCacheConfig,
    context_length: int,
    exact: float | None = None,
    pool: int | None = None,
) -> int:
    """Return the size of the staging buffer, in KV slots.

    Args:
        config: Its ``staging_tokens`` wins; 0 asks for the residual KV of
            ``max_verifies`` requests of the longest context, at most
            ``STAGING_CEILING``. A context whose residual KV alone exceeds the ceiling
            needs ``staging_tokens`` set by hand, or its requests are decoded on the
            full KV.
        context_length: Longest context the server accepts, in tokens, >= 1.
        exact: Share of a prompt that stays exact on the device; None: ``keep``.
        pool: KV slots of the device, staging included, of which the automatic size
            takes at most a ``STAGING_SHARE``-th; None: not bounded.

    Returns:
        A multiple of ``STAGING_STEP``; 0 only if the residual KV stays on the device.

    Raises:
        ConfigError: ``context_length`` is below 1.
    """
    if context_length < 1:
        raise ConfigError(f"context length must be >= 1 token, got {context_length}")
    wanted = config.staging_tokens
    if not wanted:
        share = config.keep if exact is None else exact
        residual = context_length - int(share * context_length)
        wanted = min(config.max_verifies * residual, STAGING_CEILING)
        if pool is not None:
            wanted = min(wanted, pool // STAGING_SHARE)
    return -(-wanted // STAGING_STEP) * STAGING_STEP
