"""What the tiers below the radix tree count."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class TierCounters:
    """Totals since the start of the process, in tokens where not said otherwise.

    Attributes:
        match_host_tokens: Brought back from the host for them.
        match_store_tokens: Fetched from the store to the host for them.
        restored_bytes: Bytes brought back from the host.
        restore_seconds: Time that took.
        evicted_device_tokens: Left the device.
        evicted_host_tokens: Left the host.
        checksum_failures: Segments found damaged and dropped, in segments.
        refused_segments: Segments that found no room on the host, in segments.
        inconsistencies: Times that what is cached was found not to add up.
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
        """Record tokens brought back from the host."""
        self.match_host_tokens += tokens
        self.restored_bytes += nbytes
        self.restore_seconds += seconds

    def report(self) -> dict[str, int | float]:
        """Return every counter, as ``cache_NAME``."""
        return {f"cache_{name}": value for name, value in asdict(self).items()}
