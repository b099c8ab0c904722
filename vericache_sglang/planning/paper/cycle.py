"""One draft-verify cycle, staggered or not (arXiv:2605.17613, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_sglang.planning.hardware import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Equal long-context requests on one server; the letters of the paper's Table 2.

    Attributes:
        requests: B, >= 1.
        weight_bytes: M.
        kv_full_bytes: Full KV of one request.
        keep: c, in (0, 1].
        draft_length: x, in tokens, >= 1.
    """

    requests: int
    weight_bytes: float
    kv_full_bytes: float
    keep: float
    draft_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """A cycle in which every request is verified once.

    Attributes:
        peak_bytes: Most device memory in use, weights included.
        exposed_transfer_s: Transfer time during which no forward pass runs.
    """

    peak_bytes: float
    exposed_transfer_s: float


def draft_s(batch: Batch, machine: Machine, verifies: int = 0) -> float:
    """Return the time of one iteration of drafts with ``verifies`` folded in, in s."""
    read = batch.weight_bytes + batch.requests * batch.keep * batch.kv_full_bytes
    return (read + verifies * batch.kv_full_bytes) / machine.hbm_bytes_per_s


def prefetch_s(batch: Batch, machine: Machine) -> float:
    """Return the time one full KV takes over the link, in s."""
    return batch.kv_full_bytes / machine.link_bytes_per_s


def staggered(batch: Batch, machine: Machine) -> Cycle:
    """Spread the verifications over the cycle, reloads under the drafts.

    Only what the link cannot move while x iterations of drafts run is exposed.
    """
    compressed = batch.requests * batch.keep * batch.kv_full_bytes
    total_s = batch.requests * prefetch_s(batch, machine)
    hidden_s = batch.draft_length * draft_s(batch, machine)
    return Cycle(
        peak_bytes=batch.weight_bytes + compressed + batch.kv_full_bytes,
        exposed_transfer_s=max(0.0, total_s - hidden_s),
    )


def lock_step(batch: Batch, machine: Machine) -> Cycle:
    """All requests verify at once; drafts' KV is offloaded to make room for it."""
    return Cycle(
        peak_bytes=batch.weight_bytes + batch.requests * batch.kv_full_bytes,
        exposed_transfer_s=batch.requests * prefetch_s(batch, machine),
    )


def sequential(batch: Batch, machine: Machine) -> Cycle:
    """One verification an iteration after the drafts: no peak, the same transfers."""
    return Cycle(
        peak_bytes=staggered(batch, machine).peak_bytes,
        exposed_transfer_s=lock_step(batch, machine).exposed_transfer_s,
    )
