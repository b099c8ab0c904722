"""What a forward came to, for its requests, the runtime and the counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.engine.flights import Passenger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vericache_sglang.engine.residence import Residence
    from vericache_sglang.engine.state import RequestState
    from vericache_sglang.scheduling.runtime import Runtime


class Conclusion:
    """Records a row's launch, and later, maybe at once, its outcome.

    Args:
        residence: Staging ends with the launch of what read it; counters.
        runtime: Begins the next round at the launch and learns when it lands.
        states: Requests that live, by rid.
    """

    def __init__(
        self,
        residence: Residence,
        runtime: Runtime,
        states: Mapping[str, RequestState],
    ) -> None:
        self._residence = residence
        self._runtime = runtime
        self._states = states

    def launch(
        self, state: RequestState, at: int, *, verifies: bool, emits: bool
    ) -> Passenger:
        """Record that a row's forward was launched.

        Args:
            state: The request.
            at: Its position in the schedule batch.
            verifies: The row verifies its drafts.
            emits: It verifies, or decodes plainly.
        """
        if not emits:
            state.launch_draft()
            return Passenger(state, at, -1, state.round)
        drafts = state.launch_emission()
        if verifies:
            self._residence.reloads.end(state.rid)
            self._runtime.launched(state.rid, drafts)
        return Passenger(state, at, drafts, state.round, verifies)

    def land(self, passenger: Passenger, tokens: list[int]) -> bool:
        """Record a row's outcome; that of a request that has left, or will, is nothing.

        Args:
            passenger: From ``launch``.
            tokens: The draft, or what was emitted.

        Returns:
            False where the request had ended before its results were known; they are
            discarded and nothing was counted.
        """
        state = passenger.state
        if self._states.get(state.rid) is not state or state.lost:
            return False
        if passenger.drafts < 0:
            if state.land_draft(tokens[0], passenger.round):
                self._runtime.stop_drafted(state.rid)
            return True
        if passenger.verifies:
            accepted = len(tokens) - 1
            self._residence.counters.note_round(passenger.drafts, accepted)
            state.figures.note_round(passenger.drafts, accepted)
            self._runtime.verified(state.rid, passenger.drafts, len(tokens))
        state.land_emission(tokens, passenger.drafts)
        return True
