"""Hook on ``batch_result_processor.py``: acceptance metrics of drafting iterations."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch


def resolve_spec_v2_tokens(
    original: Hook, processor: Any, result: Any, batch: Any
) -> list[list[int]]:
    """Resolve the tokens, then correct the metrics to count verifications only.

    A result with ``num_non_draft_tokens_per_req == 0`` is ours: 0 tokens mean that the
    request drafted or waited, n > 0 mean n - 1 accepted drafts and one bonus token.
    """
    accepted: list[list[int]] = original(processor, result, batch)
    if result.num_non_draft_tokens_per_req:
        return accepted
    counts = result.num_correct_drafts_per_req_cpu
    emitting = sum(count > 0 for count in counts)
    # Upstream will add a cycle of ``count`` correct drafts for every row.
    processor.metrics_reporter.spec_num_forward_ct -= len(counts) - emitting
    processor.metrics_reporter.spec_num_correct_drafts -= emitting
    for req, count in zip(batch.reqs, counts, strict=True):
        if req.is_retracted or req.finished():
            continue
        # Upstream counted a cycle of ``count`` correct drafts.
        req.spec_correct_drafts_histogram[count] -= 1
        if count == 0:
            req.spec_verify_ct -= 1
        else:
            req.spec_num_correct_drafts -= 1
            req.spec_correct_drafts_histogram[count - 1] += 1
    return accepted


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.managers.scheduler_components.batch_result_processor."
                "SchedulerBatchResultProcessor._resolve_spec_v2_tokens"
            ),
            kind="around",
            args=("self", "result", "batch"),
            reason="It takes every iteration for a verification, so meta_info would "
            "report wrong acceptance figures.",
            remove_when="SGLang accepts results in which some requests emit nothing.",
            body="2502e7dfb783",
        ),
        resolve_spec_v2_tokens,
    ),
)
