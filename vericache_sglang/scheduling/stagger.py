"""A bounded stagger: at most V verifications an iteration, reloads started ahead.

The simplest policy of the paper's section 5 family: no reservation is made; a reload is
started ``lead`` iterations before its verification is due, and a reload that is late
slips: its request drafts on up to its cap and then waits, the batch is not held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.scheduling.plan import (
    Draft,
    Limits,
    Phase,
    Plain,
    Plan,
    RowView,
    Split,
    Staged,
    StageIn,
    Verify,
    Wait,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def plan_iteration(rows: Sequence[RowView], limits: Limits) -> Plan:
    """Decide what every request does in one iteration.

    Depends on its arguments only, so tensor-parallel ranks given equal views reach
    equal plans. Linear in requests but for sorting the verifiable ones.

    Args:
        rows: The running requests in batch order.
        limits: What this iteration may spend.

    Returns:
        A plan that names every request of ``rows`` once in ``Plan.rows``.
    """
    verifies = _choose_verifies(rows, limits.max_verifies)
    splits = tuple(
        Split(row.rid) for row in rows if row.phase is Phase.PLAIN and row.splittable
    )[: limits.max_splits]
    return Plan(
        splits=splits,
        stage_ins=_choose_stage_ins(rows, limits),
        rows=tuple(_row_action(row, row.rid in verifies) for row in rows),
    )


def first_target(newcomer: int, drafting: int, draft_length: int) -> int:
    """Return the first round's draft target, spread so that verifications interleave.

    Args:
        newcomer: How many requests started drafting before this one.
        drafting: Requests drafting now, this one included; >= 1.
        draft_length: Full draft length, in tokens; >= 1.

    Returns:
        A target in [1, draft_length], in tokens; ``draft_length`` for a lone request.
    """
    phase = newcomer % drafting
    return max(1, draft_length - phase * draft_length // drafting)


def _due(row: RowView) -> bool:
    return row.drafts >= min(row.target, row.cap)


def _choose_verifies(rows: Sequence[RowView], most: int) -> set[str]:
    ready = [
        row
        for row in rows
        if row.phase is Phase.DRAFTING
        and row.staged is Staged.READY
        and not row.over
        and _due(row)
    ]
    # Longest wait first, so nobody starves; a stable sort keeps ties in batch order.
    ready.sort(key=lambda row: -row.waited)
    return {row.rid for row in ready[:most]}


def _choose_stage_ins(rows: Sequence[RowView], limits: Limits) -> tuple[StageIn, ...]:
    wanting = [
        row
        for row in rows
        if row.phase is Phase.DRAFTING
        and row.staged is Staged.ABSENT
        and not row.over
        and min(row.target, row.cap) - row.drafts <= limits.lead
    ]
    wanting.sort(key=lambda row: (-row.waited, min(row.target, row.cap) - row.drafts))
    spans = list(limits.staging_spans)
    chosen = []
    for row in wanting:
        fit = next((i for i, size in enumerate(spans) if size >= row.complement), None)
        if fit is None:
            # First come, first served: a smaller one behind must not take the room a
            # larger one has waited for.
            break
        spans[fit] -= row.complement
        chosen.append(StageIn(row.rid))
    return tuple(chosen)


def _row_action(row: RowView, verify: bool) -> Plain | Draft | Verify | Wait:
    if row.over:
        return Wait(row.rid)
    if row.phase is Phase.PLAIN:
        return Plain(row.rid)
    if verify:
        return Verify(row.rid)
    if row.drafts < row.cap:
        return Draft(row.rid)
    return Wait(row.rid)
