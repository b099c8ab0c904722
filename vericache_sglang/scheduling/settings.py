"""Settings of the runtime, fixed at start: horizon, staging buffer, link, policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Settings of one ``Runtime``, fixed at start.

    Attributes:
        pacing: "staggered" (the paper's rings), "lockstep" or "sequential".
        residency: "auto" lets the throughput model choose; "host" offloads every
            request that may be compressed, "device" none.
        keep_order: "auto" leaves the residual KV on the device: a verification reads KV
            in the order of positions there, and rounds as plain decoding does.
        draft_length: Most drafts between two verifications before proposals.
        proposals: Most tokens that an inner drafter proposes per row, by which drafts
            may exceed ``draft_length``.
        max_verifies: Most verify rows in one forward.
        staging_slots: Size of the staging buffer, in KV slots.
        token_bytes: Bytes of one KV slot over all layers.
        horizon: W, the windows of the rings, in scheduler iterations.
        transfer_fraction: Share of the residual KV's bytes that a prefetch moves.
        coalesce: Whether requests with the same residual KV share one prefetch.
        page: Page size, in KV slots.
    """

    pacing: str = "staggered"
    residency: str = "auto"
    keep_order: bool = False
    draft_length: int
    proposals: int = 0
    max_verifies: int
    staging_slots: int
    token_bytes: int
    horizon: int = 64
    transfer_fraction: float = 1.0
    coalesce: bool = True
    page: int = 1
