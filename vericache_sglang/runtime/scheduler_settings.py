"""Scheduler inputs: settings of the server and the spec of each new request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.scheduling.plan import RequestSpec
from vericache_sglang.scheduling.settings import RuntimeSettings

if TYPE_CHECKING:
    from vericache_sglang.compression.budget import Budget
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.kv.request import RequestState
    from vericache_sglang.runtime.placement import KVPlacement


def runtime_settings(
    config: VeriCacheConfig, placement: KVPlacement, *, deterministic: bool
) -> RuntimeSettings:
    """Return the runtime's settings, with sizes taken from the pool.

    Args:
        config: Of the server.
        placement: Has the pool.
        deterministic: SGLang runs with ``--enable-deterministic-inference``.
    """
    return RuntimeSettings(
        pacing=config.pacing,
        residency=config.residency,
        keep_order=deterministic,
        draft_length=config.draft_length,
        proposals=config.proposals,
        max_verifies=config.max_verifies,
        staging_slots=placement.prefetches.region.slots,
        token_bytes=placement.geometry.token_bytes,
        horizon=config.horizon,
        page=placement.geometry.page_size,
    )


def spec_of(
    state: RequestState,
    budget: Budget,
    placement: KVPlacement,
    *,
    overlap: bool,
) -> RequestSpec:
    """Return the spec by which the runtime plans a request.

    Args:
        state: The request; its full prompt KV is on the device.
        budget: Budget of its prompt.
        placement: Returns the read and transfer cost of its KV.
        overlap: The prefill's result (the tree insertion) is processed only after the
            first decode was launched.
    """
    return RequestSpec(
        rid=state.rid,
        prompt=state.prompt,
        kept=budget.slots,
        dropped=budget.offered - budget.slots,
        staged=budget.staged,
        carried=placement.carried(budget),
        reads=placement.draft_reads(budget),
        remaining=state.remaining,
        longest=state.stats.draft_length,
        ready_in=1 if overlap else 0,
        proposals=state.stats.proposals,
    )


def whole_spec_of(state: RequestState) -> RequestSpec:
    """Return the spec of a request whose prompt is never compressed."""
    return RequestSpec(
        rid=state.rid,
        prompt=state.prompt,
        kept=0,
        dropped=0,
        remaining=state.remaining,
        compressible=False,
        proposals=state.stats.proposals,
    )
