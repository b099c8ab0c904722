"""Handles a finished request until SGLang releases it.

SGLang's overlap schedule launches one more iteration before it knows that a request has
ended. In plain SGLang that iteration writes the last token's KV, which the prefix tree
keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.scheduling.plan import Plain, Wait

if TYPE_CHECKING:
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.scheduling.plan import RowAction


def last_action(state: RequestState) -> RowAction | None:
    """Return the action for a finished request, or one that cannot run yet; else None.

    The last token's KV is written only if the request is not compressed, and known to
    have finished: unreported rows may also have emitted fewer tokens than they could.
    """
    waits = state.parts is not None and not state.planned  # for its draft KV's forward
    if state.lost or waits:
        return Wait(state.rid)
    if state.remaining:
        return None
    ended = state.residency is None and not state.pending_max
    return Plain(state.rid) if ended else Wait(state.rid)


def keep_last_token(state: RequestState) -> None:
    """Let the prefix tree keep a finished request's last token if its KV is exact.

    An uncompressed row is exact up to ``verified`` tokens; SGLang's committed length
    counts only the tokens it has processed.
    """
    kv = state.req.kv
    if state.residency is None and state.verified > kv.kv_committed_len:
        kv.kv_committed_len += 1
