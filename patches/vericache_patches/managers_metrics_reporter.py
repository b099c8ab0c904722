"""Hook on ``metrics_reporter.py``: intervals without a verification."""

from __future__ import annotations

from typing import Any

from vericache_patches.record import Hook, Patch

COUNTS = ("spec_num_accept_tokens", "spec_num_correct_drafts", "spec_num_forward_ct")
TOTALS = ("spec_total_num_accept_tokens", "spec_total_num_forward_ct")
UNKNOWN = (0, 0, 1)


def report_decode_stats(original: Hook, reporter: Any, *args: Any, **more: Any) -> None:
    """Report; without a verification, repeat the acceptance of the last interval.

    Rows that drafted or waited do not count as verifications (managers_batch_result
    removes them), so an interval may have none.
    """
    if reporter.spec_num_forward_ct:
        reporter.vericache_interval = tuple(getattr(reporter, name) for name in COUNTS)
        original(reporter, *args, **more)
        return
    totals = [getattr(reporter, name) for name in TOTALS]
    _set(reporter, COUNTS, getattr(reporter, "vericache_interval", UNKNOWN))
    original(reporter, *args, **more)
    _set(reporter, COUNTS, (0, 0, 0))
    _set(reporter, TOTALS, totals)


def _set(reporter: Any, names: tuple[str, ...], values: Any) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(reporter, name, value)


HOOKS: tuple[tuple[Patch, Hook], ...] = (
    (
        Patch(
            target=(
                "sglang.srt.managers.scheduler_components.metrics_reporter."
                "SchedulerMetricsReporter.report_decode_stats"
            ),
            kind="around",
            args=(
                "self",
                "can_run_cuda_graph",
                "running_batch",
                "num_generated_tokens",
            ),
            reason="It divides by the verifications since the last report.",
            remove_when="SGLang reports intervals without a verification.",
            body="e31099fa84b1",
        ),
        report_decode_stats,
    ),
)
