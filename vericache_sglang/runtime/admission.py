"""Admission of prefilled requests to the VeriCache scheduler, after their probes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.runtime.forward.extend import KnownTokens, unseen
from vericache_sglang.runtime.scheduler_settings import spec_of, whole_spec_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.placement import KVPlacement
    from vericache_sglang.runtime.probing import Probing
    from vericache_sglang.scheduling.runtime import Runtime


class RequestAdmission:
    """Admits requests to the runtime once everything compression needs is known.

    Args:
        placement: Returns the budget and costs of each prompt.
        probing: Runs the probes of offline selectors.
        runtime: Schedules admitted requests.
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
        """Admit every request that is ready; run forwards for at most one other.

        Args:
            batch: The decode batch.
            requests: Batch index -> request.
        """
        probed = False
        for batch_index, state in requests.items():
            if state.planned:
                continue
            if state.parts is not None:
                if not probed:
                    self._start(state, batch_index, batch)
                    probed = True
                continue
            if not state.stats.enabled:
                self._arrive_whole(state)
                continue
            if (
                self._placement.compressor.known(state)
                or self._too_short(state)
                or self._probing.done(state)
            ):
                self._arrive(state)
            elif not probed:
                probed = self._probing.step(state, batch_index, batch)

    def _too_short(self, state: RequestState) -> bool:
        """Return whether a prompt has no counts, whatever a method asks to keep."""
        compressor = self._placement.compressor
        # The second names segments, which hashes the prompt.
        return (
            compressor.budget(state.prompt) is None
            and compressor.shared_budget(state) is None
        )

    def forget(self, rid: str) -> None:
        """Drop a request's pending admission and probes."""
        self._probing.forget(rid)

    def _start(
        self, state: RequestState, batch_index: int, batch: ScheduleBatch
    ) -> None:
        """Compute the end of a prompt over its draft KV; the request then drafts."""
        parts, own = state.split, state.req_pool_idx
        first, head = parts.budget.offered, parts.head
        tokens = state.req.origin_input_ids[first : state.verified]
        slots = self._placement.table[own, head : head + len(tokens)].long()
        known = KnownTokens(own, tokens, first, own, head, slots)
        self._probing.extend.run(batch, batch_index, known, unseen)
        state.planned = True
        spec = spec_of(state, parts.budget, self._placement, overlap=self._overlap)
        self._runtime.arrive_early(spec)

    def _arrive(self, state: RequestState) -> None:
        """Admit a request; its full prompt KV is on the device."""
        state.planned = True
        self._probing.forget(state.rid)
        budget = self._placement.budget(state)
        if budget is None:
            self._placement.observer.forget(state.rid)
            self._arrive_whole(state)
            return
        spec = spec_of(state, budget, self._placement, overlap=self._overlap)
        self._runtime.arrive(spec)

    def _arrive_whole(self, state: RequestState) -> None:
        """Admit a request that is not compressed, if an inner drafter may serve it."""
        state.planned = True
        if state.stats.proposals:
            self._runtime.arrive(whole_spec_of(state))
