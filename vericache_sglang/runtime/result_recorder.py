"""Records the results of a forward in its requests, the runtime and the counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.runtime.in_flight import PendingRow
from vericache_sglang.scheduling.plan import RowResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.placement import KVPlacement
    from vericache_sglang.scheduling.runtime import Runtime


class ResultRecorder:
    """Records the launch of every row and, now or later, the results of a forward.

    Args:
        placement: Frees staged KV at the launch of its verification; has the counters.
        runtime: Receives the results that its plan could not foresee.
        states: rid -> running request.
    """

    def __init__(
        self,
        placement: KVPlacement,
        runtime: Runtime,
        states: Mapping[str, RequestState],
    ) -> None:
        self._placement = placement
        self._runtime = runtime
        self._states = states

    def launch(
        self,
        state: RequestState,
        at: int,
        *,
        queries: int = 1,
        verifies: bool = False,
        emits: bool = True,
        proposals: int = 0,
    ) -> PendingRow:
        """Record that a row's forward was launched.

        Args:
            at: Its index in the schedule batch.
            queries: Its query tokens.
            verifies: The row verifies its drafts.
            emits: The row verifies or decodes autoregressively.
            proposals: Those of its query tokens that an inner drafter proposed.
        """
        row = PendingRow(state, at, state.drafts, queries, emits, verifies, proposals)
        if not emits:
            state.launch_draft(queries)
            return row
        state.launch_emission(queries)
        if verifies:
            self._placement.prefetches.end(state.rid)
        return row

    def record(
        self, rows: Sequence[PendingRow], runs: Sequence[list[int]]
    ) -> frozenset[int]:
        """Record a forward's results; discard those of finished or lost requests.

        Args:
            rows: From ``launch``.
            runs: By row, the drafted or emitted tokens.

        Returns:
            Batch indices of the requests that had ended before their results were
            known; they are discarded and not counted.
        """
        discarded = []
        results = []
        for row, tokens in zip(rows, runs, strict=True):
            state = row.state
            if row.proposals:
                self._note_proposals(row, len(tokens))
            if self._states.get(state.rid) is not state or state.lost:
                discarded.append(row.at)
            elif not row.emits:
                current = row.drafts is state.drafts
                ended = state.record_draft(tokens, row.drafts, row.queries)
                proposed = row.queries - 1
                if current and (proposed or ended):
                    results.append(
                        RowResult(
                            state.rid,
                            drafted=len(tokens),
                            proposed=proposed,
                            ended=ended,
                        )
                    )
            else:
                drafted = len(row.drafts)
                proposed = row.queries - 1 - drafted
                if row.verifies:
                    accepted = min(len(tokens) - 1, drafted)
                    self._placement.counters.note_cycle(drafted, accepted)
                    state.stats.note_cycle(drafted, accepted)
                if row.verifies or proposed:
                    results.append(
                        RowResult(
                            state.rid,
                            drafted=drafted,
                            emitted=len(tokens),
                            proposed=proposed,
                        )
                    )
                state.record_emission(tokens, row.queries)
        self._runtime.report(results)
        return frozenset(discarded)

    def _note_proposals(self, row: PendingRow, tokens: int) -> None:
        """Count a row's proposals, and those it agreed with.

        Args:
            tokens: Drafted or emitted by the row.
        """
        agreed = tokens - 1 - (len(row.drafts) if row.emits else 0)
        agreed = max(0, min(agreed, row.proposals))
        kind = "verify" if row.verifies else "plain" if row.emits else "draft"
        self._placement.counters.note_proposals(kind, row.proposals, agreed)
        row.state.stats.note_proposals(row.proposals, agreed)
