"""The row of one request in a mixed forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_sglang.kv.request import RequestState


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """The row of one request in a mixed forward.

    ``prefix``, ``at`` and ``position`` count committed tokens. While the result of the
    last verification is unreported (``pending_max``), the device adds the further
    accepted tokens to each (``DraftTokenBuffer.extra``).

    Attributes:
        batch_index: Index of the request in the schedule batch.
        own: ``req_pool_idx``, its row in ``req_to_token`` and the draft token buffer.
        table_row: Row of ``req_to_token`` that attention reads: the own row, a draft
            block-table row or a verification row.
        prefix: Length of ``table_row`` before the first query, in slots.
        at: Column of the own row with the slot of the first query's KV.
        columns: Columns of the draft token buffer that are run; one, or d + 1 in a
            verification.
        position: True position of the first query in the text.
        pending_max: Upper bound on the unreported tokens beyond the committed ones.
        packed: The request if the row begins with code slots, else None.
    """

    batch_index: int
    own: int
    table_row: int
    prefix: int
    at: int
    columns: range
    position: int
    pending_max: int = 0
    packed: RequestState | None = None
