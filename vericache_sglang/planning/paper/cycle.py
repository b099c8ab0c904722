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
    """Costs of a cycle in which every request is verified once.

    Attributes:
        peak_bytes: Peak device memory, with weights.
        exposed_transfer_s: Transfer time not overlapped by a forward, in seconds.
    """

    peak_bytes: float
    exposed_transfer_s: float


def draft_s(batch: Batch, machine: Machine, verifies: int = 0) -> float:
    """Return the time of one iteration of drafts and ``verifies``, in seconds."""
    read = batch.weight_bytes + batch.requests * batch.keep * batch.kv_full_bytes
    return (read + verifies * batch.kv_full_bytes) / machine.hbm_bytes_per_s


def prefetch_s(batch: Batch, machine: Machine) -> float:
    """Return the link time of one full KV, in seconds."""
    return batch.kv_full_bytes / machine.link_bytes_per_s


def staggered(batch: Batch, machine: Machine) -> Cycle:
    """Return a cycle with spread verifications and prefetches that overlap drafts.

    Only transfer time beyond the x iterations of drafts is exposed.
    """
    compressed = batch.requests * batch.keep * batch.kv_full_bytes
    total_s = batch.requests * prefetch_s(batch, machine)
    hidden_s = batch.draft_length * draft_s(batch, machine)
    return Cycle(
        peak_bytes=batch.weight_bytes + compressed + batch.kv_full_bytes,
        exposed_transfer_s=max(0.0, total_s - hidden_s),
    )


def lock_step(batch: Batch, machine: Machine) -> Cycle:
    """Return a cycle that verifies all requests at once, with draft KV offloaded."""
    return Cycle(
        peak_bytes=batch.weight_bytes + batch.requests * batch.kv_full_bytes,
        exposed_transfer_s=batch.requests * prefetch_s(batch, machine),
    )


def sequential(batch: Batch, machine: Machine) -> Cycle:
    """Return a cycle with one verification per iteration after the drafts."""
    return Cycle(
        peak_bytes=staggered(batch, machine).peak_bytes,
        exposed_transfer_s=lock_step(batch, machine).exposed_transfer_s,
    )
