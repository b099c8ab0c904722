"""What each tier of the prefix cache holds, from a worker's report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

TIERS = {
    "device": {
        "tokens": "cache_device_tokens",
        "draft_part_slots": "cache_draft_slots",
        "draft_part_slots_used": "cache_draft_slots_used",
        "evicted_tokens": "cache_evicted_device_tokens",
    },
    "host": {
        "tokens": "cache_host_tokens",
        "bytes": "cache_host_bytes",
        "complement_bytes": "cache_complement_bytes",
        "budget_bytes": "host_budget_bytes",
        "used_bytes": "host_used_bytes",
        "hit_tokens": "cache_match_host_tokens",
        "restored_bytes": "cache_restored_bytes",
        "restore_seconds": "cache_restore_seconds",
        "evicted_tokens": "cache_evicted_host_tokens",
        "damaged_segments": "cache_checksum_failures",
        "refused_segments": "cache_refused_segments",
    },
    "store": {
        "tokens": "cache_store_tokens",
        "bytes": "cache_store_bytes",
        "hit_tokens": "cache_match_store_tokens",
        "read_objects": "cache_store_hits",
        "missed_objects": "cache_store_misses",
        "damaged_objects": "cache_store_damaged",
        "foreign_objects": "cache_store_foreign",
        "read_bytes": "cache_store_read_bytes",
        "written_bytes": "cache_store_written_bytes",
        "waiting_writes": "cache_store_waiting",
        "dropped_writes": "cache_store_dropped_writes",
        "failed_calls": "cache_store_failed_calls",
        "refused_calls": "cache_store_refused_calls",
    },
}
"""Tier -> name -> key of the worker's report."""


def cache_tiers(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the segments known, and what each tier holds and did.

    Args:
        report: ``VeriCacheWorker.report``.
    """
    tiers = {
        tier: {name: report[key] for name, key in keys.items()}
        for tier, keys in TIERS.items()
    }
    return {"segments": report["cache_segments"], **tiers}
