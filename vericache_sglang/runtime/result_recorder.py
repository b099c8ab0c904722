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
        self, state: RequestState, at: int, *, verifies: bool, emits: bool
    ) -> PendingRow:
        """Record that a row's forward was launched.

        Args:
            at: Its index in the schedule batch.
            verifies: The row verifies its drafts.
            emits: The row verifies or decodes autoregressively.
        """
        if not emits:
            state.launch_draft()
            return PendingRow(state, at, -1, state.cycle)
        drafts = state.launch_emission()
        if verifies:
            self._placement.prefetches.end(state.rid)
        return PendingRow(state, at, drafts, state.cycle, verifies)

    def land(
        self, rows: Sequence[PendingRow], runs: Sequence[list[int]]
    ) -> frozenset[int]:
        """Record a forward's results; discard those of finished or lost requests.

        Args:
            rows: From ``launch``.
            runs: By row, the drafted token or the emitted tokens.

        Returns:
            Batch indices of the requests that had ended before their results were
            known; they are discarded and not counted.
        """
        discarded = []
        results = []
        for row, tokens in zip(rows, runs, strict=True):
            state = row.state
            if self._states.get(state.rid) is not state or state.lost:
                discarded.append(row.at)
            elif row.drafts < 0:
                if state.land_draft(tokens[0], row.cycle):
                    results.append(RowResult(state.rid))
            else:
                if row.verifies:
                    accepted = len(tokens) - 1
                    self._placement.counters.note_cycle(row.drafts, accepted)
                    state.stats.note_cycle(row.drafts, accepted)
                    results.append(RowResult(state.rid, row.drafts, len(tokens)))
                state.land_emission(tokens, row.drafts)
        self._runtime.report(results)
        return frozenset(discarded)
