"""Shape of the block table: rows of requests, of verifications and of drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig

ENTRY_BYTES = 4
"""Bytes of an entry: int32 in SGLang 0.5.21 (``ReqToTokenPool.req_to_token``)."""


@dataclass(frozen=True, slots=True)
class BlockTableShape:
    """Rows and columns of SGLang's block table, extended for VeriCache.

    Row 0 is for the padding of CUDA graphs, rows 1 to ``requests`` are those of running
    requests; the rows of verifications and one draft row per request follow.

    Attributes:
        requests: Most running requests.
        verifies: Most verifications in one forward.
        width: Columns, in KV slots.
    """

    requests: int
    verifies: int
    width: int

    @property
    def verify_rows(self) -> range:
        """Rows that list the full KV of a verified request."""
        start = 1 + self.requests
        return range(start, start + self.verifies)

    @property
    def draft_rows(self) -> range:
        """Rows that list the draft KV of requests whose own rows list the full KV."""
        start = self.verify_rows.stop
        return range(start, start + self.requests)

    @property
    def rows(self) -> int:
        """Total number of rows."""
        return self.draft_rows.stop

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.rows * self.width * ENTRY_BYTES


def block_table_shape(
    config: VeriCacheConfig, requests: int, width: int, page: int, kept: float
) -> BlockTableShape:
    """Return the shape of the block table of a server.

    Args:
        config: Settings of the server.
        requests: Most running requests (``--max-running-requests``), >= 1.
        width: Columns that SGLang allocates, in KV slots: the context length and its
            headroom for drafts.
        page: Page size, in KV slots.
        kept: Largest draft KV, as a share of the prompt's KV slots, in (0, 1].
    """
    # Twice the tokens of a verification (SGLang reserves two, allocation_sizing.py)
    # and a page for rounding; the draft KV may be listed after a full prompt.
    extra = 2 * (config.most_drafts + 1) + int(kept * width) + 2 * page
    return BlockTableShape(requests, config.max_verifies, width + extra)
