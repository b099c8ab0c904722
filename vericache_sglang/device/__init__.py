"""Host memory limits, pinned memory, and small copies between host and device."""
