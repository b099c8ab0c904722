"""A request between its last token and its release.

SGLang's overlap schedule launches one more iteration before it knows that a request has
ended. On plain SGLang that writes the last token's KV, which the prefix tree keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.kv.request import Layout
from vericache_sglang.scheduling.plan import Plain, Wait

if TYPE_CHECKING:
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.scheduling.plan import RowAction


def last_action(state: RequestState) -> RowAction | None:
    """Return what a request does that emits nothing any more; None where it lives.

    Its last token gets its KV where that costs no reload.
    """
    if state.lost:
        return Wait(state.rid)
    if state.remaining:
        return None
    return Plain(state.rid) if state.layout is Layout.WHOLE else Wait(state.rid)


def keep_last_token(state: RequestState) -> None:
    """Have a finished request's last token go into the prefix tree, if it has exact KV.

    A whole row is exact up to ``verified``; SGLang counts what it has processed.
    """
    kv = state.req.kv
    if state.layout is Layout.WHOLE and state.verified > kv.kv_committed_len:
        kv.kv_committed_len += 1
