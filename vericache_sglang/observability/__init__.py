"""What is seen of a server: counters, metrics, trace, online consistency check."""
