"""From a finished prefill to the runtime: probes first, then the plan knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.runtime.scheduler_settings import shape_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.placement import KVPlacement
    from vericache_sglang.runtime.probing import Probing
    from vericache_sglang.scheduling.runtime import Runtime


class Entrance:
    """Hands requests to the runtime once all is known that splitting them takes.

    Args:
        placement: Counts and prices their parts.
        probing: Runs the probes of offline methods.
        runtime: Plans them from then on.
        overlap: SGLang runs its overlap schedule.
    """

    def __init__(
        self,
        placement: KVPlacement,
        probing: Probing,
        runtime: Runtime,
        *,
        overlap: bool,
    ) -> None:
        self._placement = placement
        self._probing = probing
        self._runtime = runtime
        self._overlap = overlap

    def pass_on(self, batch: ScheduleBatch, requests: dict[int, RequestState]) -> None:
        """Hand over every request that is ready; run at most one probe of another.

        Args:
            batch: The decode batch.
            requests: Position in the batch -> request.
        """
        probed = False
        for batch_index, state in requests.items():
            if not state.eligible or state.planned:
                continue
            if self._placement.shared.known(state) or self._probing.done(state):
                self._arrive(state, cached=not batch.tree_cache.disable)
            elif not probed:
                probed = self._probing.step(state, batch_index, batch)

    def forget(self, rid: str) -> None:
        """Drop what a request still waits for."""
        self._probing.forget(rid)

    def _arrive(self, state: RequestState, *, cached: bool) -> None:
        """Hand a request over; its prompt is whole on the device."""
        state.planned = True
        self._probing.forget(state.rid)
        budget = self._placement.budget(state)
        if budget is None:
            self._placement.watch.forget(state.rid)
            return
        shape = shape_of(
            state, budget, self._placement, cached=cached, overlap=self._overlap
        )
        self._runtime.arrive(shape)
