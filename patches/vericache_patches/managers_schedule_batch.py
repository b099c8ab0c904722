"""Hook on ``sglang/srt/managers/schedule_batch.py``: where a request ends."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def update_finish_state(original: Hook, req: Any, new_accepted_len: int = 1) -> None:
    """Check a run of accepted tokens one by one, as one-token decoding would.

    Upstream checks the whole run stop string by stop string, and strings before
    tokens, so a run may end later, or for another reason, than single tokens do.
    """
    if new_accepted_len == 0 and not req.to_finish:
        return
    if new_accepted_len <= 1 or req.to_finish or req.finished():
        original(req, new_accepted_len)
        return
    run = req.output_ids[-new_accepted_len:]
    del req.output_ids[-new_accepted_len:]
    grammar = req.grammar
    for i, token in enumerate(run):
        req.output_ids.append(token)
        # The grammar has the whole run already, cut after the token that completes it.
        req.grammar = grammar if i == len(run) - 1 else None
        original(req, 1)
        req.grammar = grammar
        if req.finished():
            if req.finished_len is None:
                req.finished_len = len(req.output_ids)
            # They were counted for the whole run, before it was cut.
            req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)
            # Their KV is in the row, so they stay; finished_len trims the answer.
            req.output_ids.extend(run[i + 1 :])
            return


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
            kind="around",
            args=("self", "new_accepted_len"),
            reason="Its result depends on how many tokens arrive at once, and an empty "
            "run costs O(output) per drafting request and iteration.",
            remove_when="SGLang checks accepted runs token by token.",
        ),
        update_finish_state,
    ),
)
