"""The metrics of cached prefixes: what each tier holds, hit and lost."""

from __future__ import annotations

from vericache_sglang.telemetry.metric import Metric, counter, gauge

CACHE = (
    Metric(
        "vericache_cached_tokens",
        "gauge",
        "tokens",
        "Tokens of cached prefixes in whole segments, by where their KV is; in the "
        "store those known that are nowhere else.",
        (
            ("device", "cache_device_tokens"),
            ("host", "cache_host_tokens"),
            ("store", "cache_store_tokens"),
        ),
        label="tier",
    ),
    Metric(
        "vericache_cached_host_bytes",
        "gauge",
        "bytes",
        "Host memory of cached prefixes, by form; whole counts draft parts too.",
        (("all", "cache_host_bytes"), ("complement", "cache_complement_bytes")),
        label="form",
    ),
    Metric(
        "vericache_draft_part_slots",
        "gauge",
        "KV slots",
        "Slots of draft parts that prompts share.",
        (("used", "cache_draft_slots_used"), ("all", "cache_draft_slots")),
        label="state",
    ),
    Metric(
        "vericache_cache_hit_tokens_total",
        "counter",
        "tokens",
        "Prompt tokens brought back from below the device instead of prefilled.",
        (("host", "cache_match_host_tokens"), ("store", "cache_match_store_tokens")),
        label="tier",
    ),
    Metric(
        "vericache_cache_evicted_tokens_total",
        "counter",
        "tokens",
        "Cached tokens that left a tier.",
        (
            ("device", "cache_evicted_device_tokens"),
            ("host", "cache_evicted_host_tokens"),
        ),
        label="tier",
    ),
    counter(
        "cache_restored_bytes",
        "bytes",
        "cache_restored_bytes",
        "Bytes of prefixes brought back from the host.",
    ),
    counter(
        "cache_restore_seconds",
        "seconds",
        "cache_restore_seconds",
        "Time that took.",
    ),
    counter(
        "cache_damaged_segments",
        "segments",
        "cache_checksum_failures",
        "Segments whose host copy failed its checksum; they are prefilled again.",
    ),
    counter(
        "cache_refused_segments",
        "segments",
        "cache_refused_segments",
        "Segments that left the device and found no room on the host.",
    ),
    Metric(
        "vericache_store_reads_total",
        "counter",
        "objects",
        "Objects asked of the store, by outcome.",
        (
            ("hit", "cache_store_hits"),
            ("miss", "cache_store_misses"),
            ("damaged", "cache_store_damaged"),
            ("foreign", "cache_store_foreign"),
        ),
        label="outcome",
    ),
    Metric(
        "vericache_store_bytes_total",
        "counter",
        "bytes",
        "Bytes exchanged with the store.",
        (("read", "cache_store_read_bytes"), ("written", "cache_store_written_bytes")),
        label="direction",
    ),
    gauge(
        "store_waiting_writes",
        "segments",
        "cache_store_waiting",
        "Segments that wait to be written to the store.",
    ),
    counter(
        "store_dropped_writes",
        "segments",
        "cache_store_dropped_writes",
        "Segments not stored: the queue was full, or the backend refused.",
    ),
    Metric(
        "vericache_store_bad_calls_total",
        "counter",
        "calls",
        "Calls of the store's backend that failed, or were not made after failures.",
        (
            ("failed", "cache_store_failed_calls"),
            ("refused", "cache_store_refused_calls"),
        ),
        label="outcome",
    ),
)
