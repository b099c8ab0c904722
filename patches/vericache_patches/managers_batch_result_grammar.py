"""Hook on ``batch_result_processor.py``: whether a grammar had ended before a run."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch
from vericache_sglang.sampling.grammar import note_end


def advance_grammar_fsm(
    original: Hook, processor: Any, result: Any, batch: Any
) -> None:
    """Note the states of grammars before they accept a spec worker's tokens.

    ``update_finish_state`` (patches: managers_schedule_batch) reads them.
    """
    if result.accept_lens is not None and not result.grammar_advanced:
        for req in batch.reqs:
            if req.grammar is not None:
                note_end(req)
    original(processor, result, batch)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.managers.scheduler_components.batch_result_processor."
                "SchedulerBatchResultProcessor.advance_grammar_fsm"
            ),
            kind="around",
            args=("self", "result", "batch"),
            reason="Of a spec worker's results SGLang accepts the tokens before it "
            "looks whether the request has finished, of others afterwards; so a "
            "request whose end token is ignored would end one token earlier.",
            remove_when="SGLang looks in the same order at both.",
        ),
        advance_grammar_fsm,
    ),
)
