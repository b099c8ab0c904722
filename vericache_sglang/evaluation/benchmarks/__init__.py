"""The named benchmarks of the demo models, one or a few a module."""
