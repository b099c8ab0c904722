"""The policies that are compared, as settings of the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Row = TypeVar("Row")

PLANES_DRAFT_SHARE = 0.31
"""Share of the KV's bytes in the draft plane: 5 of 16 bits."""

PLANES_PREFETCH_SHARE = 0.39
"""Share of the KV's bytes in the residual planes, entropy coded."""

PLANES_ACCEPT = 0.99
"""p with the draft plane, assumed; the demo model reached 46.7 of at most 47.7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One row of the table.

    Bit planes keep a share of the bytes of every token instead of some tokens. They are
    modelled by bytes: the draft KV counts as ``keep`` of the slots, the residual KV as
    the others, and ``prefetch`` is the share of the KV that crosses the link.

    Attributes:
        name: Name on the command line.
        summary: Description of the policy.
        drafts: Whether requests speculate; else all decode autoregressively.
        pacing: See ``RuntimeSettings``.
        residency: See ``RuntimeSettings``.
        staging: Size of the staging buffer. "none", "few": the residual KV that is in
            transfer or being verified, "batch": that of every request of the batch.
        coalesce: Whether requests with one prompt share a prefetched residual KV.
        keep: c, share of the KV that drafts read, in (0, 1].
        prefetch: Share of the full KV that one prefetch moves, > 0.
        accept: p of every request; None: each request's own.
    """

    name: str
    summary: str
    drafts: bool = True
    pacing: str = "staggered"
    residency: str = "host"
    staging: str = "few"
    coalesce: bool = False
    keep: float
    prefetch: float
    accept: float | None = None


def policies(keep: float, planes_accept: float = PLANES_ACCEPT) -> dict[str, Policy]:
    """Return every policy by name, in the order of the table.

    Args:
        keep: c of the policies that drop tokens, in (0, 1).
        planes_accept: p of the policies with bit planes.

    Raises:
        ConfigError: An argument is out of bounds.
    """
    if not 0 < keep < 1:
        raise ConfigError(f"--keep must be in (0, 1), got {keep}")
    if not 0 <= planes_accept <= 1:
        raise ConfigError(f"--planes-accept must be in [0, 1], got {planes_accept}")
    rest = 1 - keep
    every = (
        Policy(
            name="full-kv",
            summary="plain decoding, every request's full KV on the device",
            drafts=False,
            residency="device",
            staging="none",
            keep=keep,
            prefetch=rest,
        ),
        Policy(
            name="sparse-resident",
            summary="draft KV beside resident full KV; SparseSpec selects in place, "
            "without further memory",
            residency="device",
            staging="none",
            keep=keep,
            prefetch=rest,
        ),
        Policy(
            name="lock-step",
            summary="everyone drafts, then all prefetch and verify together",
            pacing="lockstep",
            staging="batch",
            keep=keep,
            prefetch=rest,
        ),
        Policy(
            name="sequential",
            summary="everyone drafts, then one after the other prefetches and verifies",
            pacing="sequential",
            keep=keep,
            prefetch=rest,
        ),
        Policy(
            name="staggered",
            summary="prefetches and verifications spread by the rings",
            keep=keep,
            prefetch=rest,
        ),
        Policy(
            name="staggered-copy",
            summary="the same, each prefetch moving the whole KV, as the paper's",
            keep=keep,
            prefetch=1.0,
        ),
        Policy(
            name="coalesced",
            summary="staggered, requests with one prompt share prefetches",
            coalesce=True,
            keep=keep,
            prefetch=rest,
        ),
        Policy(
            name="split-planes",
            summary="staggered, drafts on high-order bits of every token",
            keep=PLANES_DRAFT_SHARE,
            prefetch=PLANES_PREFETCH_SHARE,
            accept=planes_accept,
        ),
        Policy(
            name="hybrid",
            summary="staggered, the throughput model chooses each residency",
            residency="auto",
            keep=keep,
            prefetch=rest,
        ),
        Policy(
            name="combined",
            summary="hybrid, coalesced, with split planes",
            residency="auto",
            coalesce=True,
            keep=PLANES_DRAFT_SHARE,
            prefetch=PLANES_PREFETCH_SHARE,
            accept=planes_accept,
        ),
    )
    return {policy.name: policy for policy in every}


def named(names: str, known: Mapping[str, Row], flag: str) -> dict[str, Row]:
    """Return the rows named in a comma-separated list, or "all".

    Args:
        names: Value of the flag.
        known: Policies or presets by name.
        flag: Name of the flag, for the message.

    Raises:
        ConfigError: A name is unknown; the message lists the known ones.
    """
    if names == "all":
        return dict(known)
    picked = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in picked if name not in known]
    if unknown or not picked:
        raise ConfigError(
            f"{flag} {', '.join(unknown) or 'is empty'}; known: {', '.join(known)}"
        )
    return {name: known[name] for name in picked}
