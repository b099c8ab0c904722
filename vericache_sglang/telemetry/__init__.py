"""What an iteration was, and where that is written: metrics, traces."""
