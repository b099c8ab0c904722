"""Admission of prefilled requests to the VeriCache scheduler, after their probes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.runtime.forward.codes import over_draft_kv
from vericache_sglang.runtime.forward.extend import KnownTokens, unseen
from vericache_sglang.runtime.scheduler_settings import spec_of, whole_spec_of
from vericache_sglang.scheduling.draft_length import FIRST_WAIT

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.placement import KVPlacement
    from vericache_sglang.runtime.probing import Probing
    from vericache_sglang.runtime.tp_sync import TensorParallelSync
    from vericache_sglang.scheduling.runtime import Runtime


class RequestAdmission:
    """Admits requests to the runtime once everything compression needs is known.

    Args:
        placement: Returns the budget and costs of each prompt.
        probing: Runs the probes of offline selectors.
        runtime: Schedules admitted requests.
        tp_sync: Gives all ranks the same estimates.
        overlap: SGLang runs its overlap schedule.
    """

    def __init__(
        self,
        placement: KVPlacement,
        probing: Probing,
        runtime: Runtime,
        tp_sync: TensorParallelSync,
        *,
        overlap: bool,
    ) -> None:
        self._placement = placement
        self._probing = probing
        self._runtime = runtime
        self._tp_sync = tp_sync
        # rid -> iteration in which to ask again whether its probes pay; 0: they do.
        self._ask_at: dict[str, int] = {}
        self._overlap = overlap

    def pass_on(self, batch: ScheduleBatch, requests: dict[int, RequestState]) -> bool:
        """Admit every request that is ready; run forwards for at most one other.

        Args:
            batch: The decode batch.
            requests: Batch index -> request.

        Returns:
            Whether a forward ran.
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
                or (budget := self._budget(state)) is None
                or self._probing.done(state)
            ):
                self._arrive(state)
            elif not probed and self._pays(state, budget, batch):
                probed = self._probing.step(state, batch_index, batch)
            elif not probed and state.stats.proposals:
                self._arrive_whole(state)
        return probed

    def _pays(self, state: RequestState, budget: Budget, batch: ScheduleBatch) -> bool:
        """Return whether a prompt's probes should run; asked again if they should not.

        They should while requests wait for memory, which only compressed ones free.
        """
        now = self._placement.counters.iterations
        ask_at = self._ask_at.get(state.rid, now)
        if batch.batch_is_full or not ask_at:
            return True
        if now < ask_at:
            return False
        self._tp_sync.sync_inputs(self._placement.host_slots, ())
        spec = spec_of(state, budget, self._placement, overlap=self._overlap)
        work = self._probing.work(state)
        pays = self._runtime.probes_pay(spec, len(batch.reqs), work)
        self._ask_at[state.rid] = 0 if pays else now + FIRST_WAIT
        return pays

    def _budget(self, state: RequestState) -> Budget | None:
        """Return a prompt's counts, whatever a method asks to keep; None: too short."""
        compressor = self._placement.compressor
        # The second names segments, which hashes the prompt.
        return compressor.budget(state.prompt) or compressor.shared_budget(state)

    def forget(self, rid: str) -> None:
        """Drop a request's pending admission and probes."""
        self._ask_at.pop(rid, None)
        self._probing.forget(rid)

    def _start(
        self, state: RequestState, batch_index: int, batch: ScheduleBatch
    ) -> None:
        """Compute the end of a prompt over its draft KV; the request then drafts."""
        parts, own = state.split, state.req_pool_idx
        first, head = parts.budget.offered, parts.head
        tokens = state.text(first, state.verified)
        slots = self._placement.table[own, head : head + len(tokens)].long()
        known = KnownTokens(own, tokens, first, own, head, slots)
        known = over_draft_kv(self._placement, state, known)
        self._probing.extend.run(batch, batch_index, known, unseen)
        state.planned = True
        spec = spec_of(state, parts.budget, self._placement, overlap=self._overlap)
        self._runtime.arrive_early(spec)

    def _arrive(self, state: RequestState) -> None:
        """Admit a request; its full prompt KV is on the device."""
        state.planned = True
        self.forget(state.rid)
        budget = self._placement.budget(state)
        if budget is None:
            self._placement.observer.forget(state.rid)
            self._arrive_whole(state)
            return
        self._tp_sync.measured.split_s.pass_over()
        spec = spec_of(state, budget, self._placement, overlap=self._overlap)
        self._runtime.arrive(spec)

    def _arrive_whole(self, state: RequestState) -> None:
        """Admit a request that is not compressed, if an inner drafter may serve it."""
        state.planned = True
        if state.stats.proposals:
            self._runtime.arrive(whole_spec_of(state))
