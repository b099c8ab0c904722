"""Upper bounds on the throughput of any schedule, to compare a plan with."""

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
    """Return the largest speedup over a full-KV server that is bound by KV reads.

    That server emits at most one token per full KV read from device memory; ours at
    most ``tokens_per_verify`` per prefetch. If an iteration reads mostly weights, or
    memory holds few full KVs, the full-KV server is below its limit and the ratio may
    be exceeded.

    Args:
        tokens_per_verify: Accepted drafts per cycle, with or without the bonus token,
            as the caller chooses; >= 0.
        machine: Provides link and device memory bandwidth.
        transfer_fraction: Part of the full KV that one prefetch moves, >= 0.

    Returns:
        tokens * (link / HBM) / transfer_fraction; infinite if nothing is prefetched.
    """
    if transfer_fraction < 0 or tokens_per_verify < 0:
        raise ConfigError("tokens_per_verify and transfer_fraction must be >= 0")
    if transfer_fraction == 0:
        return inf
    ratio = machine.link_bytes_per_s / machine.hbm_bytes_per_s
    return tokens_per_verify * ratio / transfer_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Tokens per second of all requests together that each resource allows.

    Attributes:
        link_tokens_per_s: Bound by prefetches.
        hbm_tokens_per_s: Bound by reads of KV; reads of weights are neglected.
        full_kv_tokens_per_s: Bound by reads of KV when decoding on the full KV.
    """

    link_tokens_per_s: float
    hbm_tokens_per_s: float
    full_kv_tokens_per_s: float

    @property
    def tokens_per_s(self) -> float:
        """Upper bound of a server that offloads every request."""
        return min(self.link_tokens_per_s, self.hbm_tokens_per_s)


def roofline(
    machine: Machine,
    kv_full_bytes: float,
    keep: float,
    cycle_of: tuple[int, float],
    transfer_fraction: float,
) -> Roofline:
    """Return the upper bounds of a server that offloads every request.

    Args:
        machine: Rates of the server.
        kv_full_bytes: Full KV of a request.
        keep: c, in (0, 1].
        cycle_of: Draft length and expected accepted drafts of a cycle.
        transfer_fraction: Part of the full KV that one prefetch moves, > 0.
    """
    drafted, accepted = cycle_of
    full = machine.hbm_bytes_per_s / kv_full_bytes
    return Roofline(
        link_tokens_per_s=full
        * speedup_bound(accepted + 1, machine, transfer_fraction),
        hbm_tokens_per_s=full * (accepted + 1) / (drafted * keep + 1),
        full_kv_tokens_per_s=full,
    )
