"""Has the attention of a forward read the codes with which rows of draft KV begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.attention.forward_row import ForwardRow
from vericache_sglang.attention.packed_rows import MOST_KNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.forward.extend import KnownTokens
    from vericache_sglang.runtime.placement import KVPlacement


def read_codes(
    placement: KVPlacement, forward: ForwardBatch, rows: Sequence[ForwardRow]
) -> None:
    """Set what the attention backend reads in place of code slots.

    Args:
        placement: Has the codes.
        forward: From ``build_forward``; changed in place.
        rows: Its rows; those with ``packed`` begin with code slots.
    """
    codes, draft_codes = placement.codes, placement.draft_codes
    if draft_codes is not None:
        forward.spec_info.coded = draft_codes.of(rows)
    elif codes is not None:
        forward.spec_info.packed = {
            i: (row.packed.split.budget.code_slots, codes.decoded(row.packed))
            for i, row in enumerate(rows)
            if row.packed is not None
        }


def over_draft_kv(
    placement: KVPlacement, state: RequestState, known: KnownTokens
) -> KnownTokens:
    """Return known tokens of a row of draft KV, whose codes are read as such.

    Args:
        placement: See ``read_codes``.
        state: Their request.
        known: The tokens; their row lists the request's draft KV.
    """
    if not state.split.budget.coded:
        return known

    def read(forward: ForwardBatch, prefix: int, count: int) -> None:
        row = ForwardRow(
            batch_index=0,
            own=known.owner,
            table_row=known.row,
            prefix=prefix,
            at=prefix,
            columns=range(count),
            position=known.position,
            text=known.position,
            packed=state,
        )
        read_codes(placement, forward, [row])

    longest = known.longest if placement.draft_codes is None else MOST_KNOWN
    return known._replace(codes=read, longest=longest)
