"""Records the results of a forward in its requests, the runtime and the counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.runtime.in_flight import PendingRow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.placement import KVPlacement
    from vericache_sglang.scheduling.runtime import Runtime


class ResultRecorder:
    """Records the launch of a row and, now or later, its results.

    Args:
        placement: Frees staged KV at the launch of its verification; has the counters.
        runtime: Starts the next draft-verify cycle at the launch and receives results.
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
            state: The request.
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
            self._runtime.launched(state.rid, drafts)
        return PendingRow(state, at, drafts, state.cycle, verifies)

    def land(self, pending_row: PendingRow, tokens: list[int]) -> bool:
        """Record a row's results; discard those of finished or lost requests.

        Args:
            pending_row: From ``launch``.
            tokens: The drafted token, or the emitted tokens.

        Returns:
            False if the request had ended before its results were known; they are
            discarded and not counted.
        """
        state = pending_row.state
        if self._states.get(state.rid) is not state or state.lost:
            return False
        if pending_row.drafts < 0:
            if state.land_draft(tokens[0], pending_row.cycle):
                self._runtime.stop_drafted(state.rid)
            return True
        if pending_row.verifies:
            accepted = len(tokens) - 1
            self._placement.counters.note_cycle(pending_row.drafts, accepted)
            state.stats.note_cycle(pending_row.drafts, accepted)
            self._runtime.verified(state.rid, pending_row.drafts, len(tokens))
        state.land_emission(tokens, pending_row.drafts)
        return True
