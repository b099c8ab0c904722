"""Observability: counters, metrics, trace, online consistency check."""
