"""Counters of the cache tiers below the radix tree."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class TierCounters:
    """Totals since the start of the process.

    Attributes:
        match_host_tokens: Tokens restored from the host for matched prefixes.
        match_store_tokens: Tokens fetched from the store to the host.
        restored_bytes: Bytes restored from the host.
        restore_seconds: Time spent in these restores, in seconds.
        checksum_failures: Segments found corrupt and dropped.
        refused_segments: Segments not saved because the host had no room.
        inconsistencies: Inconsistencies found in the state of the cache.
    """

    match_host_tokens: int = 0
    match_store_tokens: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    evicted_device_tokens: int = 0
    evicted_host_tokens: int = 0
    checksum_failures: int = 0
    refused_segments: int = 0
    inconsistencies: int = 0

    def note_restored(self, tokens: int, nbytes: int, seconds: float) -> None:
        """Record tokens restored from the host."""
        self.match_host_tokens += tokens
        self.restored_bytes += nbytes
        self.restore_seconds += seconds

    def report(self) -> dict[str, int | float]:
        """Return every counter, as ``cache_NAME``."""
        return {f"cache_{name}": value for name, value in asdict(self).items()}
