"""Numbers and pinned memory between host and device."""
