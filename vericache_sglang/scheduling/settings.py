"""What the runtime may use: horizon, staging, link and the policy, fixed at start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Fixed for the life of a ``Runtime``.

    Attributes:
        pacing: "staggered" (the paper's rings), "lockstep" or "sequential".
        residency: "auto" lets the throughput model choose; "host" offloads every
            request that may be split, "device" none.
        draft_length: Most drafts between two verifications: the width of the graph.
        max_verifies: Verify rows in one forward.
        staging_slots: Size of the staging region, in KV slots.
        token_bytes: Bytes of one KV slot over all layers.
        horizon: Windows of the rings, W.
        transfer_fraction: Share of a complement's bytes that a reload moves.
        coalesce: Requests with the same complement share one staging.
        page: Slots of a page.
    """

    pacing: str = "staggered"
    residency: str = "auto"
    draft_length: int
    max_verifies: int
    staging_slots: int
    token_bytes: int
    horizon: int = 64
    transfer_fraction: float = 1.0
    coalesce: bool = True
    page: int = 1
