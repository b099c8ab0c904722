"""Compares systems over HTTP: what clients see of each, in one alternating run."""
