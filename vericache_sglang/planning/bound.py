"""Ceilings no schedule gets past, for a plan to be held against."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from vericache_sglang.errors import ConfigError

if TYPE_CHECKING:
    from vericache_sglang.planning.hardware import Machine


def speedup_bound(
    tokens_per_verify: float, machine: Machine, transfer_fraction: float
) -> float:
    """Return the most speedup over a full-KV server saturated by reads of KV.

    That server emits at most one token per full KV read from device memory; ours at
    most ``tokens_per_verify`` per reload. Where weights are most of what an iteration
    reads, or memory holds few full KVs, the full-KV server is below its limit and the
    ratio may be exceeded.

    Args:
        tokens_per_verify: Accepted drafts of a round, the verifier's own token not
            counted or counted, as the caller means it; >= 0.
        machine: Its link and device memory rates.
        transfer_fraction: Part of the full KV one reload moves, >= 0.

    Returns:
        tokens * (link / HBM) / transfer_fraction; infinite where nothing is reloaded.
    """
    if transfer_fraction < 0 or tokens_per_verify < 0:
        raise ConfigError("tokens_per_verify and transfer_fraction must be >= 0")
    if transfer_fraction == 0:
        return inf
    ratio = machine.link_bytes_per_s / machine.hbm_bytes_per_s
    return tokens_per_verify * ratio / transfer_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Tokens per second each resource allows all requests together.

    Attributes:
        link_tokens_per_s: Reloads alone.
        hbm_tokens_per_s: Reads of KV alone; weights cost nothing in a huge batch.
        full_kv_tokens_per_s: The same for decoding on the full KV.
    """

    link_tokens_per_s: float
    hbm_tokens_per_s: float
    full_kv_tokens_per_s: float

    @property
    def tokens_per_s(self) -> float:
        """Most that an all-offloading server can reach."""
        return min(self.link_tokens_per_s, self.hbm_tokens_per_s)


def roofline(
    machine: Machine,
    kv_full_bytes: float,
    keep: float,
    round_of: tuple[int, float],
    transfer_fraction: float,
) -> Roofline:
    """Return the ceilings of a server that offloads every request.

    Args:
        machine: Its rates.
        kv_full_bytes: Full KV of a request.
        keep: c, in (0, 1].
        round_of: Draft length and expected accepted drafts.
        transfer_fraction: Part of the full KV one reload moves, > 0.
    """
    drafted, accepted = round_of
    full = machine.hbm_bytes_per_s / kv_full_bytes
    return Roofline(
        link_tokens_per_s=full
        * speedup_bound(accepted + 1, machine, transfer_fraction),
        hbm_tokens_per_s=full * (accepted + 1) / (drafted * keep + 1),
        full_kv_tokens_per_s=full,
    )
