"""One request's share of a mixed forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_sglang.kv.request import RequestState


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """One request's share of a mixed forward.

    Places are those the host is certain of. Where it has not heard yet how much of the
    last verification was accepted (``pending_max``), all of them move on by what the
    device knows (``DraftTokenBuffer.extra``).

    Attributes:
        batch_index: Position of the request in the schedule batch.
        own: The request's row of ``req_to_token``, and of the token board.
        table_row: Row of ``req_to_token`` the attention reads: own or shadow.
        prefix: Slots of that row before the first query, in slots.
        at: Place in the own row where the first query's KV is written.
        columns: Columns of the token board that are run; 1, or d + 1 in a verification.
        position: True position of the first query in the text.
        pending_max: Most tokens that the places may be off by.
        packed: The request, where the row begins with slots of codes.
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
