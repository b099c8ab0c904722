"""Hook on ``sglang/srt/managers/schedule_batch.py``: finish checks per token."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def update_finish_state(original: Hook, req: Any, new_accepted_len: int = 1) -> None:
    """Check accepted tokens one by one, as autoregressive decoding would.

    Upstream checks all accepted tokens stop string by stop string, and strings before
    tokens, so a request could end later, or for another reason, than token by token.
    """
    if new_accepted_len == 0 and not req.to_finish:
        return
    grammar, known = req.grammar, len(req.output_ids) - new_accepted_len
    # As without a spec worker, it ends a request with the token behind its own end.
    at, ended = getattr(req, "vericache_grammar_ended", (-1, False))
    ending = grammar if ended or at != known else None
    if new_accepted_len <= 1 or req.to_finish or req.finished():
        req.grammar = ending
        original(req, new_accepted_len)
        req.grammar = grammar
        return
    run = req.output_ids[known:]
    del req.output_ids[known:]
    for i, token in enumerate(run):
        req.output_ids.append(token)
        req.grammar = ending if i == len(run) - 1 else None
        original(req, 1)
        req.grammar = grammar
        if req.finished():
            if req.finished_len is None:
                req.finished_len = len(req.output_ids)
            # Reasoning tokens were counted for the full run.
            req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)
            # Their KV is in the row, so they are kept; finished_len trims the output.
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
            body="0d617abe1589",
        ),
        update_finish_state,
    ),
)
