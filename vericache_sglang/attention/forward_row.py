"""The row of one request in a mixed forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_sglang.kv.request import RequestState


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """The row of one request in a mixed forward.

    ``prefix``, ``at``, ``position`` and ``text`` count what is certain. While results
    are unreported (``pending_max``), the device adds the further accepted and drafted
    tokens to each: it knows the position (``DraftTokenBuffer``).

    Attributes:
        batch_index: Index of the request in the schedule batch.
        own: ``req_pool_idx``, its row in ``req_to_token`` and the draft token buffer.
        table_row: Row of ``req_to_token`` that attention reads: the own row, a draft
            block-table row or a verification row.
        prefix: Length of ``table_row`` before the first query, in slots.
        at: Column of the own row with the slot of the first query's KV.
        columns: Columns of the draft token buffer that are run, if nothing is
            unreported: the last draft's, or all of them in a verification; and those of
            proposals.
        position: True position of the first query in the text.
        text: Tokens of the text up to the pending token, or the last draft.
        pending_max: Upper bound on the unreported tokens beyond the certain ones.
        drafts: The row drafts, so that its columns begin with the last draft.
        speculates: The row drafts or verifies. Before an autoregressive row, drafts on
            the device are those that a fall back to full KV has dropped.
        proposals: Columns behind the others, which an inner drafter fills.
        shared: That drafter may use what other requests said.
        packed: The request if the row begins with code slots, else None.
    """

    batch_index: int
    own: int
    table_row: int
    prefix: int
    at: int
    columns: range
    position: int
    text: int
    pending_max: int = 0
    drafts: bool = False
    speculates: bool = False
    proposals: int = 0
    shared: bool = False
    packed: RequestState | None = None
