"""The runtime's fixed settings, from the configuration and the built pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_sglang.scheduling.settings import RuntimeSettings

if TYPE_CHECKING:
    from vericache_sglang.config.schema import VeriCacheConfig
    from vericache_sglang.engine.residence import Residence


def runtime_settings(config: VeriCacheConfig, residence: Residence) -> RuntimeSettings:
    """Return what the runtime has to know; sizes are the pool's."""
    return RuntimeSettings(
        pacing=config.pacing,
        residency=config.residency,
        draft_length=config.draft_length,
        max_verifies=config.max_verifies,
        staging_slots=residence.reloads.region.slots,
        token_bytes=residence.geometry.token_bytes,
        horizon=config.horizon,
        page=residence.geometry.page_size,
    )
