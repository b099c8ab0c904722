"""Hook on ``sglang/srt/disaggregation/decode.py``: KV that is sent a second time."""

from __future__ import annotations

import random
from typing import Any

from vericache_patches.record import Hook, Patch


def add(
    original: Hook,
    queue: Any,
    req: Any,
    is_retracted: bool = False,
    is_rebootstrap: bool = False,
) -> None:
    """Have the KV of a retracted request sent again by its prefill server.

    SGLang does so itself after new weights (``pause_generation``).
    """
    from vericache_sglang.runtime.algorithm import served_config

    if is_retracted and served_config() is not None:
        is_retracted, is_rebootstrap = False, True
        # Its KV is made by the decode that follows, as with every last token.
        req.pd_rebootstrap_forced_output_id = req.output_ids.pop()
        req.pd_rebootstrap_in_progress = True
        # The prefill server may not have cleared the old room yet.
        req.bootstrap_room = random.randrange(1, 1 << 63)
    original(queue, req, is_retracted, is_rebootstrap)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.disaggregation.decode.DecodePreallocQueue.add",
            kind="around",
            args=("self", "req", "is_retracted", "is_rebootstrap"),
            reason="A retracted request would continue from a copy of its row by token "
            "position, which a compressed row does not list, and a decode server "
            "cannot prefill a request that lost its KV.",
            remove_when="SGLang asks the algorithm which requests start again.",
            body="fd0aa115a59f",
        ),
        add,
    ),
)
