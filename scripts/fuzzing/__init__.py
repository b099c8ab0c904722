"""Malformed bodies, hang-ups and aborts against a live server."""
