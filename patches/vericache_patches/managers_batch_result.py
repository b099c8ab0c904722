"""Hook on ``batch_result_processor.py``: SGLang's acceptance figures."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch
from vericache_sglang.observability.acceptance_counts import verifications_only


def process_batch_result_decode(
    original: Hook, processor: Any, batch: Any, result: Any
) -> None:
    """Process a result; a row that drafted or waited is no verification."""
    if batch.spec_algorithm.is_none():
        original(processor, batch, result)
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()  # the original waits first too
    with verifications_only(
        processor.metrics_reporter,
        batch.reqs,
        result.accept_lens.tolist(),
        result.num_non_draft_tokens_per_req,
    ):
        original(processor, batch, result)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.managers.scheduler_components.batch_result_processor."
                "SchedulerBatchResultProcessor.process_batch_result_decode"
            ),
            kind="around",
            args=("self", "batch", "result"),
            reason="It takes every row of every iteration for a verification, so "
            "meta_info and metrics would report wrong figures of acceptance, and "
            "divides by the verifications since the last report.",
            remove_when="SGLang accepts results in which some requests emit nothing.",
            body="9a2fd6dc6df5",
        ),
        process_batch_result_decode,
    ),
)
